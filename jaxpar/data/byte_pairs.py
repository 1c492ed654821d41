"""How does text become tokens that are longer than bytes? By byte-pair encoding.

The work is done by the `tokenizers` library; its `Tokenizer` also reads the
``tokenizer.json`` of models on Hugging Face.

Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units"
(2016); on bytes as in GPT-2.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxpar.data.tokens import Tokens

_CHUNK_BYTES = 1 << 17
"""About as much text is tokenized at once, in parallel with other chunks."""

_NEWLINE, _SPACE = ord("\n"), ord(" ")


def open_tokenizer(
    path: str | os.PathLike[str], text: Tokens, vocab_size: int
) -> Tokenizer:
    """Read a tokenizer, or train one on a text and write it.

    Training depends only on the text and the size, so the processes of a run may do it
    side by side.

    Args:
      path: a ``tokenizer.json``; written if missing.
      text: bytes to train on.
      vocab_size: tokens of the vocabulary, at least the 256 bytes. A short text gives
        fewer.

    Returns:
      The tokenizer.

    Raises:
      ValueError: if the text is not bytes, or the vocabulary smaller than 256.
    """
    path = Path(path)
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(text, vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    tokenizer.save(str(unfinished))
    unfinished.replace(path)
    return tokenizer


def tokenize(
    train: Tokens, heldout: Tokens, vocab_size: int, folder: str | os.PathLike[str]
) -> tuple[Tokens, Tokens, Tokenizer | None]:
    """Make byte pairs of two splits, if they are text and the model reads more.

    Args:
      train: the training split; its tokenizer is trained on it.
      heldout: the held-out split.
      vocab_size: of the model; 256 or fewer for a model of bytes.
      folder: where ``tokenizer.json`` is, or is written.

    Returns:
      (train, heldout, tokenizer); as given, and None, for token files and for bytes.
    """
    if train.vocab_size != 256 or vocab_size <= 256:
        return train, heldout, None
    tokenizer = open_tokenizer(Path(folder, "tokenizer.json"), train, vocab_size)
    return encode(tokenizer, train), encode(tokenizer, heldout), tokenizer


def train_tokenizer(text: Tokens, vocab_size: int) -> Tokenizer:
    """Learn a byte-pair vocabulary from a text.

    Args:
      text: bytes, such as `jaxpar.data.read_tokens` gives for text files.
      vocab_size: tokens of the vocabulary; at least 256, which are single bytes.

    Returns:
      The tokenizer. Every text can be encoded, and decodes to itself.

    Raises:
      ValueError: if the text is not bytes, or the vocabulary smaller than 256.

    Example:
      >>> text = Tokens((np.frombuffer(b"one two one two" * 9, np.uint8),), ("text",))
      >>> train_tokenizer(text, 264).encode("one two").tokens
      ['one', 'Ġtwo']
    """
    _require_bytes(text)
    if vocab_size < 256:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least 256, the number of bytes."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_chunks(text), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: Tokens) -> Tokens:
    """Encode a text.

    Args:
      tokenizer: any of the `tokenizers` library.
      text: bytes; those that are not UTF-8 are replaced.

    Returns:
      The ids, as uint16 or, for a large vocabulary, uint32, with the text's files and
      number of bytes.

    Raises:
      ValueError: if the text is not bytes.
    """
    _require_bytes(text)
    size = tokenizer.get_vocab_size()
    dtype = np.uint16 if size <= 1 << 16 else np.uint32
    ids = [
        np.asarray(encoding.ids, dtype)
        for encoding in tokenizer.encode_batch_fast(
            list(_chunks(text)), add_special_tokens=False
        )
    ]
    return Tokens((np.concatenate(ids),), text.files, size, num_bytes=len(text))


def _chunks(text: Tokens) -> Iterator[str]:
    """Cut a text before newlines: a word ends there, and a run of whitespace begins."""
    start = 0
    while start < len(text):
        chunk = text.read(start, start + _CHUNK_BYTES)
        if start + len(chunk) < len(text):
            ends = (chunk[1:] == _NEWLINE) & (chunk[:-1] > _SPACE)
            if ends.any():
                chunk = chunk[: np.flatnonzero(ends)[-1] + 1]
        start += len(chunk)
        yield chunk.tobytes().decode(errors="replace")


def _require_bytes(text: Tokens) -> None:
    if text.dtype != np.uint8:
        raise ValueError(
            f"text: {text.files[0]!r} holds {text.dtype} ids, not bytes; token files "
            "need no tokenizer."
        )
