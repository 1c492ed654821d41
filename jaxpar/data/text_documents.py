"""Which documents, and which spans of them, are in a corpus of bytes?

What rows said was learned, and where documents end, is found again, so that bytes that
were read once can be encoded by any tokenizer.
"""

import codecs
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from jaxpar.data.documents import TextSpan
from jaxpar.data.encoding import Document
from jaxpar.data.tokens import Tokens

_CHUNK_BYTES = 1 << 17
"""About as much text is encoded at once, in parallel with other chunks."""

_NEWLINE, _SPACE = ord("\n"), ord(" ")


def require_bytes(text: Tokens) -> None:
    """Raise ValueError unless a corpus is text."""
    if text.dtype != np.uint8:
        raise ValueError(
            f"text: {text.files[0]!r} holds {text.dtype} ids, not bytes; token files "
            "need no tokenizer."
        )


def chunks(text: Tokens, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Cut text before line breaks: a word ends there, and a run of white space begins.

    Args:
      text: bytes; those that are not UTF-8 are replaced.
      start: position of the first byte.
      stop: position after the last; None for the end.

    Yields:
      Pieces of about 128 KiB, or of a line of more than that.
    """
    stop = len(text) if stop is None else stop
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while start < stop:
        chunk = text.read(start, min(start + _CHUNK_BYTES, stop))
        if start + len(chunk) < stop:
            ends = (chunk[1:] == _NEWLINE) & (chunk[:-1] > _SPACE)
            if ends.any():
                chunk = chunk[: np.flatnonzero(ends)[-1] + 1]
        start += len(chunk)
        yield decoder.decode(chunk.tobytes(), start >= stop)


def documents_of(
    text: Tokens,
    *,
    is_heldout: bool = False,
    ends: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[Document]:
    """Read the documents of a corpus of bytes.

    Args:
      text: bytes; if it has no `Tokens.starts`, it is one document.
      is_heldout: of all of them.
      ends: whether each ends with the end-of-text token; else only where the byte
        `Tokens.end_id` says so.
      advance: called with the bytes that are done.

    Yields:
      The documents, of which a long one is not held in memory.
    """
    require_bytes(text)
    starts = [0] if text.starts is None else text.starts
    # One at a time: as Python's numbers, those of a large corpus take gigabytes.
    bounds = itertools.chain(map(int, starts), [len(text)])
    for start, stop in itertools.pairwise(bounds):
        spans = _spans(text, start, stop, ends)
        yield Document(spans, is_heldout)
        advance(stop - start)


def _spans(text: Tokens, start: int, stop: int, ends: bool) -> Iterator[TextSpan]:
    if text.loss_mask is not None:
        yield from _masked(text, start, stop)
        return
    if text.end_id is not None and text.read(stop - 1, stop)[0] == text.end_id:
        ends, stop = True, stop - 1
    last = ""
    for chunk in chunks(text, start, stop):
        if last:
            yield TextSpan(last)
        last = chunk
    yield TextSpan(last, ends=ends)


def _masked(text: Tokens, start: int, stop: int) -> Iterator[TextSpan]:
    """The runs of a document that are learned or not, and their ends."""
    assert text.loss_mask is not None
    data, mask = text.read(start, stop), text.loss_mask[start:stop]
    changes = (np.flatnonzero(np.diff(mask)) + 1).tolist()
    for begin, end in zip([0, *changes], [*changes, len(data)], strict=True):
        ends = data[end - 1] == text.end_id
        content = data[begin : end - ends].tobytes().decode(errors="replace")
        yield TextSpan(content, is_learned=bool(mask[begin]), ends=bool(ends))
