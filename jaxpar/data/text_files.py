"""Is a file text, and where is a corpus of text files cut in two?

A file is read once: its bytes are checked to be UTF-8, and hashed, in bounded memory.
"""

import codecs
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxpar.data.disk_array import DiskArray
from jaxpar.data.splits import is_heldout
from jaxpar.data.tokens import Tokens, first_of, is_first
from jaxpar.progress import counting

_OTHER_FORMATS = {
    b"PAR1": "parquet: name it .parquet",
    b"\x1f\x8b": "gzip: unpack it (gzip -d), or name rows of JSON .jsonl.gz",
    b"\x28\xb5\x2f\xfd": "zstandard: unpack it (zstd -d)",
    b"PK\x03\x04": "zip: unpack it",
    b"ARROW1": "Arrow: name it .arrow",
    b"\x93NUMPY": "NumPy's: name it .npy",
    b"\xff\xfe": "text in UTF-16: convert it (iconv -f UTF-16 -t UTF-8)",
}
_LINE_BYTES = 1 << 20
"""Read at a time to find the end of a line."""


def read_text(files: Sequence[tuple[str, Path]]) -> Tokens:
    """Read text files as one sequence of bytes, in the order given.

    Args:
      files: (name, path) pairs.

    Returns:
      The bytes, read from disk as they are used; ``vocab_size`` is 256, and each file
      is a document.

    Raises:
      ValueError: if a file is not UTF-8, or all are empty.
    """
    return _read(_opened(files))[0].tokens()


def split_text(
    files: Sequence[tuple[str, Path]], share: float
) -> tuple[Tokens, Tokens, str]:
    """Read text files, and hold a share of them out.

    By a hash of its content, a file stays in its split when others are added. Where
    there is one file, or the hash leaves a split without one, the end of the text is
    held out instead.

    Args:
      files: (name, path) pairs.
      share: of the files that is held out.

    Returns:
      (train, heldout, held_out_text): both as by `read_text`, and what was held out.

    Raises:
      ValueError: as in `read_text`, or if the text is too short.
    """
    texts = _opened(files)
    num = sum(len(text.array) > 0 for text in texts)
    if num > 1:
        train, heldout = _read(texts, share)
        if train.num_bytes and heldout.num_bytes:
            held_out_text = (
                f"{len(heldout.texts)} of {num} files, by a hash of their content"
            )
            return train.tokens(), heldout.tokens(), held_out_text
    before, after = _cut(texts, share)
    train, heldout = _read(before)[0].tokens(), _read(after)[0].tokens()
    start = "line" if after[0].array.offset else "document"
    return train, heldout, f"the last {len(heldout):,} bytes, from a new {start} on"


@dataclasses.dataclass(frozen=True)
class _Text:
    """A text file, or a part of it."""

    name: str
    array: DiskArray


def _opened(files: Sequence[tuple[str, Path]]) -> list[_Text]:
    return [_Text(name, DiskArray(path, np.uint8)) for name, path in files]


class _Split:
    """What is known of one split while files are read."""

    def __init__(self):
        self.texts: list[_Text] = []
        self.digest = hashlib.sha256()

    @property
    def num_bytes(self) -> int:
        return sum(len(text.array) for text in self.texts)

    def tokens(self) -> Tokens:
        ends = [*itertools.accumulate(len(text.array) for text in self.texts)]
        starts = sorted({0, *ends} - {self.num_bytes})
        return Tokens(
            tuple(text.array for text in self.texts),
            tuple(text.name for text in self.texts),
            256,
            num_bytes=self.num_bytes,
            starts=np.array(starts, np.int64) if starts else None,
            known_sha256=self.digest.hexdigest(),
        )


def _read(texts: Sequence[_Text], share: float = 0.0) -> tuple[_Split, _Split]:
    """Read each file once: check it, hash it, and choose its split."""
    train, heldout = _Split(), _Split()
    total = sum(text.array.nbytes for text in texts)
    what = f"reading {first_of([text.name for text in texts])}"
    with counting(what, total, unit="B", shown=is_first()) as advance:
        for text in texts:
            # The split is known at the end of the file: both digests go on until then.
            digests = train.digest.copy(), heldout.digest.copy()
            content, check = xxhash.xxh3_64(), _Utf8(text)
            feeds = [content.update, check.feed, digests[0].update]
            feeds += [digests[1].update] if share else []

            def see(piece: np.ndarray, feeds: list[Any] = feeds) -> None:
                for feed in feeds:
                    feed(piece)
                advance(piece.nbytes)

            text.array.scan(see)
            check.end()
            is_held = is_heldout(content.intdigest(), share)
            split = heldout if is_held else train
            split.texts.append(text)
            split.digest = digests[is_held]
    return train, heldout


def _cut(texts: Sequence[_Text], share: float) -> tuple[list[_Text], list[_Text]]:
    """Cut a text in two at a new line or file, near where the share begins."""
    texts = [text for text in texts if len(text.array)]
    total = sum(len(text.array) for text in texts)
    at = min(round(total * (1 - share)), total - 1)
    for number, text in enumerate(texts):
        array, size = text.array, len(text.array)
        if at >= size:
            at -= size
            continue
        line = _line_near(array, at)
        if line is not None:
            first = _Text(text.name, array.cut(0, line))
            last = _Text(text.name, array.cut(line, size))
            return [*texts[:number], first], [last, *texts[number + 1 :]]
        if len(texts) > 1:
            first_held = max(number, 1)
            return texts[:first_held], texts[first_held:]
    raise ValueError(
        f"heldout: the text has {total:,} bytes and no line that {share:.0%} of it can "
        "be cut off at; give more text, or held-out files (--heldout)."
    )


def _line_near(array: DiskArray, at: int) -> int | None:
    """The first start of a line after a position, or the last before; None without."""
    for start in range(at, len(array), _LINE_BYTES):
        found = np.flatnonzero(array[start : start + _LINE_BYTES] == ord("\n"))
        if len(found) and start + found[0] + 1 < len(array):
            return start + int(found[0]) + 1
    for stop in range(at, 0, -_LINE_BYTES):
        start = max(stop - _LINE_BYTES, 0)
        found = np.flatnonzero(array[start:stop] == ord("\n"))
        if len(found):
            return start + int(found[-1]) + 1
    return None


class _Utf8:
    """Checks a file's bytes piece by piece."""

    def __init__(self, text: _Text):
        self._text, self._open, self._done = text, b"", 0

    def feed(self, piece: np.ndarray, *, is_last: bool = False) -> None:
        data = self._open + piece.tobytes()
        if not self._done and self._text.array.offset == 0:
            self._refuse_other_formats(data)
        try:
            _, used = codecs.utf_8_decode(data, "strict", is_last)
        except UnicodeDecodeError as error:
            at = self._text.array.offset + self._done + error.start
            raise ValueError(
                f"{self._named()}: byte {at:,} is 0x{data[error.start]:02x}, which is "
                "not UTF-8. Known are text in UTF-8, .jsonl, .parquet, folders that "
                "datasets saved, .npy and .bin; convert other text (iconv -f LATIN1 "
                "-t UTF-8), and give a file the suffix of its format."
            ) from None
        self._open, self._done = data[used:], self._done + used

    def end(self) -> None:
        self.feed(np.empty(0, np.uint8), is_last=True)

    def _refuse_other_formats(self, data: bytes) -> None:
        for start, what in _OTHER_FORMATS.items():
            if data.startswith(start):
                raise ValueError(f"{self._named()}: it begins as {what}.")

    def _named(self) -> str:
        return f"paths: '{self._text.array.path}' is not text"
