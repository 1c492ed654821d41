"""How does text become tokens that are longer than bytes? By byte-pair encoding.

The work is done by the `tokenizers` library; its `Tokenizer` also reads the
``tokenizer.json`` of models on Hugging Face.

Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units"
(2016); on bytes as in GPT-2.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxpar.data.cache import cached, root_for, unfinished
from jaxpar.data.disk_array import DiskArray
from jaxpar.data.encoding import Encoded, Encoder, encode_documents, tokenizer_encoder
from jaxpar.data.text_documents import chunks, documents_of, require_bytes
from jaxpar.data.token_files import open_split, write_tokens
from jaxpar.data.tokens import Tokens, first_of, is_first
from jaxpar.launch.own_files import exists, retried, write_whole
from jaxpar.progress import counting

_TRAINED_ON = 1 << 28
"""Characters that a vocabulary is learned from, the first of the text."""

END = "<|endoftext|>"
"""Of a trained vocabulary, where documents have an end."""


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
    if exists(path):
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(text, vocab_size)
    retried(lambda: path.parent.mkdir(parents=True, exist_ok=True), path)
    write_whole(own := unfinished(path), tokenizer.to_str(pretty=True), durable=True)
    retried(lambda: own.replace(path), path)
    return tokenizer


def tokenize(
    train: Tokens,
    heldout: Tokens,
    vocab_size: int,
    folder: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
) -> tuple[Tokens, Tokens, Tokenizer | None]:
    """Make byte pairs of two splits, if they are text and the model reads more.

    Args:
      train: the training split; its tokenizer is trained on it.
      heldout: the held-out split.
      vocab_size: of the model; 256 or fewer for a model of bytes.
      folder: where ``tokenizer.json`` is, or is written.
      cache: the folder of the tokens' cache; None for one beside the data.

    Returns:
      (train, heldout, tokenizer); as given, and None, for token files and for bytes.
    """
    if train.dtype != np.uint8 or vocab_size <= 256:
        return train, heldout, None
    tokenizer = open_tokenizer(Path(folder, "tokenizer.json"), train, vocab_size)
    train, held = (encode(tokenizer, text, cache=cache) for text in (train, heldout))
    held = dataclasses.replace(held, is_heldout=heldout.is_heldout)
    return train, held, tokenizer


def train_tokenizer(text: Tokens, vocab_size: int) -> Tokenizer:
    """Learn a byte-pair vocabulary from a text, or the first 268 MB of it.

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
    require_bytes(text)
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
        special_tokens=[] if text.end_id is None else [END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginning(text), trainer)
    return tokenizer


def _beginning(text: Tokens) -> Iterator[str]:
    """The text that a vocabulary is learned from, without the ends of documents."""
    spans = (span.text for each in documents_of(text) for span in each.spans)
    taken, total = 0, min(len(text), _TRAINED_ON)
    with counting("reading for a tokenizer", total, unit="B", shown=is_first()) as more:
        for piece in chunks(text) if text.end_id is None else spans:
            yield piece
            taken += len(piece)
            more(len(piece))
            if taken >= _TRAINED_ON:
                return


def encode(
    tokenizer: Tokenizer,
    text: Tokens,
    *,
    cache: str | os.PathLike[str] | None = None,
    ends: bool = False,
    eos_token: str | None = None,
) -> Tokens:
    """Encode a text; a text on disk once, into a cache.

    Args:
      tokenizer: any of the `tokenizers` library.
      text: bytes; those that are not UTF-8 are replaced.
      cache: the folder of the cache; None for one beside the data.
      ends: whether each document ends with the tokenizer's end-of-text token, also
        where the text has no end for it.
      eos_token: that token; None for one of the usual names.

    Returns:
      The ids, as uint16 or, for a large vocabulary, uint32, with the text's files,
      documents, loss mask and number of bytes.

    Raises:
      ValueError: if the text is not bytes, or the cache can't be written.
    """
    require_bytes(text)
    encoder = tokenizer_encoder(tokenizer, eos_token)

    def stream(advance: Callable[[int], None]) -> Iterator[Encoded]:
        return encode_documents(documents_of(text, ends=ends, advance=advance), encoder)

    if not isinstance(text.parts[0], DiskArray):
        return _joined([*stream(lambda _: None)], text, encoder)
    starts = text.starts if text.starts is not None else np.zeros(1, np.int64)
    key = {
        "sha256": text.sha256,
        "starts": xxhash.xxh3_128_hexdigest(np.ascontiguousarray(starts)),
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "ends": ends,
        "end": encoder.end.tolist(),
    }

    def build(folder: Path) -> dict[str, Any]:
        what = f"tokenizing {first_of(text.files)}"
        with counting(what, len(text), unit="B", shown=is_first()) as advance:
            return write_tokens(folder, stream(advance), encoder)

    folder, index = cached(root_for([text.parts[0].path], cache), key, build)
    tokens = open_split(folder, index, "train", text.files)
    assert tokens is not None, "text that is not empty has tokens"
    return tokens


def _joined(stream: Sequence[Encoded], text: Tokens, encoder: Encoder) -> Tokens:
    """What a text in memory is encoded to, in memory."""
    ends = np.cumsum([len(each.ids) for each in stream])
    starts = [
        each.starts + end - len(each.ids)
        for each, end in zip(stream, ends, strict=True)
    ]
    learned = np.concatenate([each.learned for each in stream])
    return Tokens(
        (np.concatenate([each.ids for each in stream]),),
        text.files,
        encoder.vocab_size,
        num_bytes=sum(each.num_bytes for each in stream),
        starts=np.concatenate(starts) if text.starts is not None else None,
        loss_mask=None if learned.all() else learned,
        end_id=encoder.end_id,
    )
