"""How do documents become ids, which of them are learned, and where does each begin?

A document ends with the tokenizer's end-of-text token, or a line break if it has none.
Bytes end with the byte 0; rows with that in their text are bad rows.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt8
from tokenizers import Tokenizer

from jaxpar.data.documents import TextSpan

Ids = Integer[np.ndarray, "_"]

_BATCH_CHARACTERS = 1 << 20
"""As much text is encoded at once, in parallel; its encodings take 100 times that."""

_BATCH_PIECES = 1 << 16

_USUAL_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Text to ids.

    Attributes:
      encode: of several texts, each by itself.
      vocab_size: one more than the largest id.
      end: ids that end a document.
      end_id: the id that ends every document; None where `end` also stands in text.
    """

    encode: Callable[[Sequence[str]], list[Ids]]
    vocab_size: int
    end: Ids
    end_id: int | None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all ids: uint8 for bytes, uint16 or uint32 for tokens."""
        return self.end.dtype


@dataclasses.dataclass(frozen=True)
class Document:
    """A document of the corpus, possibly too long for memory.

    Attributes:
      spans: in order.
      is_heldout: whether it is held out.
    """

    spans: Iterable[TextSpan]
    is_heldout: bool = False


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Some consecutive ids of a split.

    Attributes:
      is_heldout: which split.
      ids: the ids.
      learned: 1 for those to be learned.
      starts: positions in `ids` where documents start.
      num_bytes: of the text.
    """

    is_heldout: bool
    ids: Ids
    learned: UInt8[np.ndarray, "_"]
    starts: Int64[np.ndarray, "_"]
    num_bytes: int


def bytes_encoder(eos_token: str | None = None) -> Encoder:
    """Encode text as its bytes in UTF-8.

    Args:
      eos_token: a character of one byte that ends documents; None for the byte 0.

    Raises:
      ValueError: if it is not one byte.
    """
    end = "\0" if eos_token is None else eos_token
    if len(end.encode()) != 1:
        raise ValueError(
            f"eos_token={end!r} must be one byte where there is no tokenizer; give "
            "one, such as '\\n', or None for the byte 0."
        )

    def encode(texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    (ids,) = encode([end])
    return Encoder(encode, 256, ids, int(ids[0]))


def tokenizer_encoder(tokenizer: Tokenizer, eos_token: str | None = None) -> Encoder:
    """Encode text by a tokenizer, without the tokens that it would put around texts.

    Args:
      tokenizer: its truncation and padding are switched off.
      eos_token: the token that ends documents; None for one of the usual names.

    Raises:
      ValueError: if the tokenizer has no such token.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if eos_token is None:
        vocabulary = tokenizer.get_vocab()
        eos_token = next((name for name in _USUAL_ENDS if name in vocabulary), None)
    elif tokenizer.token_to_id(eos_token) is None:
        raise ValueError(
            f"eos_token={eos_token!r} is not a token of the tokenizer; give one of its "
            "tokens, or None to find it."
        )
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32

    def encode(texts: Sequence[str]) -> list[Ids]:
        found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(each.ids, dtype) for each in found]

    if eos_token is None:
        return Encoder(encode, vocab_size, encode(["\n"])[0], None)
    end_id = tokenizer.token_to_id(eos_token)
    assert end_id is not None
    return Encoder(encode, vocab_size, np.array([end_id], dtype), end_id)


def read_tokenizer(path: Path) -> tuple[Tokenizer, str | None]:
    """Read a tokenizer, and which of its tokens ends a text.

    Args:
      path: a ``tokenizer.json``. A ``tokenizer_config.json`` beside it names the token.

    Returns:
      (tokenizer, token); None if no file says so.

    Raises:
      ValueError: if the file can't be read as a tokenizer.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer='{path}' is not a file; give the tokenizer.json of a model."
        )
    text = path.read_text(encoding="utf-8")
    # The library's own errors have no class but Exception.
    if "model" not in _object_of(path, text):
        raise ValueError(
            f"tokenizer='{path}' has no \"model\", so it is not of the tokenizers "
            "library; give the tokenizer.json of a model."
        )
    beside = path.with_name("tokenizer_config.json")
    named = _object_of(beside, beside.read_text()) if beside.exists() else {}
    end = named.get("eos_token")
    return Tokenizer.from_str(text), end["content"] if isinstance(end, dict) else end


def _object_of(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"tokenizer: '{path}' is not JSON ({error}).") from error
    return found if isinstance(found, dict) else {}


def encode_documents(
    documents: Iterable[Document], encoder: Encoder
) -> Iterator[Encoded]:
    """Encode documents in bounded memory, whatever their length and number.

    Args:
      documents: in order.
      encoder: of their texts.

    Yields:
      The ids of each split, in the order of the documents.
    """
    batch: list[_Placed] = []
    starts_next = {False: False, True: False}
    size = 0
    for document in documents:
        starts = True
        for span in document.spans:
            batch.append(_Placed(span, starts, document.is_heldout))
            starts, size = False, size + len(span.text)
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
                yield from _flush(batch, encoder, starts_next)
                batch, size = [], 0
    yield from _flush(batch, encoder, starts_next)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A span, and where it belongs."""

    span: TextSpan
    starts: bool
    is_heldout: bool


def _flush(
    batch: Sequence[_Placed], encoder: Encoder, starts_next: dict[bool, bool]
) -> Iterator[Encoded]:
    """Encode spans.

    Args:
      batch: the spans.
      encoder: of their texts.
      starts_next: by split, whether a document starts at its next id; updated.
    """
    encoded = encoder.encode([placed.span.text for placed in batch])
    for is_heldout in starts_next:
        own = [
            (placed, ids)
            for placed, ids in zip(batch, encoded, strict=True)
            if placed.is_heldout == is_heldout
        ]
        if own:
            yield _joined(own, is_heldout, encoder, starts_next)


def _joined(
    own: Sequence[tuple[_Placed, Ids]],
    is_heldout: bool,
    encoder: Encoder,
    starts_next: dict[bool, bool],
) -> Encoded:
    arrays: list[Ids] = []
    starts, lengths, flags = [], [], []
    at, num_bytes = 0, 0
    for placed, ids in own:
        starts_next[is_heldout] |= placed.starts
        arrays.append(ids)
        length = len(ids)
        if placed.span.ends:
            arrays.append(encoder.end)
            length += len(encoder.end)
        if length and starts_next[is_heldout]:
            starts.append(at)
            starts_next[is_heldout] = False
        lengths.append(length)
        flags.append(placed.span.is_learned)
        at += length
        num_bytes += len(placed.span.text.encode())
    return Encoded(
        is_heldout,
        np.concatenate(arrays),
        np.repeat(np.array(flags, np.uint8), lengths),
        np.array(starts, np.int64),
        num_bytes,
    )
