"""How are ids, document starts and loss masks written to a folder, and opened again?

Arrays are raw, in the machine's byte order. They are written in pieces, so that a
corpus may be larger than memory.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxpar.data.disk_array import DiskArray
from jaxpar.data.encoding import Encoded, Encoder
from jaxpar.data.tokens import Tokens, joint_sha256

SPLITS = ("train", "heldout")

_ONES = np.ones(1 << 20, np.uint8)


def write_tokens(
    folder: Path, stream: Iterable[Encoded], encoder: Encoder
) -> dict[str, Any]:
    """Write what documents are encoded to.

    Args:
      folder: exists, and is empty.
      stream: of the ids.
      encoder: that made them.

    Returns:
      What `open_split` needs: JSON's types, by split; no entry for a split without ids.
    """
    with contextlib.ExitStack() as files:
        writers = [_SplitWriter(folder, name, encoder.dtype, files) for name in SPLITS]
        for encoded in stream:
            writers[encoded.is_heldout].add(encoded)
        entries = {writer.name: writer.close() for writer in writers}
    return {
        "dtype": encoder.dtype.str,
        "vocab_size": encoder.vocab_size,
        "end_id": encoder.end_id,
        "splits": {name: entry for name, entry in entries.items() if entry["tokens"]},
    }


def open_split(
    folder: Path, index: Mapping[str, Any], split: str, files: tuple[str, ...]
) -> Tokens | None:
    """Open a split that `write_tokens` wrote.

    Args:
      folder: that was written.
      index: that it returned.
      split: "train" or "heldout".
      files: the names of the sources.

    Returns:
      Its tokens; None if it has none.

    Raises:
      ValueError: if a file has another size than was written.
    """
    entry = index["splits"].get(split)
    if entry is None:
        return None
    num = entry["tokens"]
    starts = _opened(folder / f"{split}.starts", np.int64, entry["documents"])
    has_mask = entry["mask_sha256"] is not None
    mask = _opened(folder / f"{split}.mask", np.uint8, num) if has_mask else None
    identity = entry["ids_sha256"]
    return Tokens(
        (_opened(folder / f"{split}.ids", index["dtype"], num),),
        files,
        index["vocab_size"],
        num_bytes=entry["num_bytes"],
        starts=starts[:],
        loss_mask=mask,
        end_id=index["end_id"],
        known_sha256=(
            joint_sha256(identity, entry["mask_sha256"]) if has_mask else identity
        ),
    )


def _opened(path: Path, dtype: DTypeLike, length: int) -> DiskArray:
    remedy = f"Delete '{path.parent}', which is then written again."
    expected = length * np.dtype(dtype).itemsize
    if not path.exists() or path.stat().st_size != expected:
        found = path.stat().st_size if path.exists() else "no"
        raise ValueError(
            f"'{path}' has {found} bytes, but {expected:,} were written. {remedy}"
        )
    return DiskArray(path, dtype, length=length, remedy=remedy)


class _ArrayWriter:
    """Writes an array piece by piece, and hashes it."""

    def __init__(self, path: Path, dtype: DTypeLike, files: contextlib.ExitStack):
        self._dtype = np.dtype(dtype)
        self._file = files.enter_context(path.open("wb"))
        self._digest = hashlib.sha256()

    def add(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array, self._dtype)
        self._file.write(data)
        self._digest.update(data)

    def close(self) -> str:
        """Sync the file; return its sha256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()


class _SplitWriter:
    """Writes one split."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype, files: contextlib.ExitStack
    ):
        self.name, self._folder, self._files = name, folder, files
        self._ids = _ArrayWriter(folder / f"{name}.ids", dtype, files)
        self._starts = _ArrayWriter(folder / f"{name}.starts", np.int64, files)
        self._mask: _ArrayWriter | None = None
        self._num = self._documents = self._num_bytes = 0

    def add(self, encoded: Encoded) -> None:
        if self._mask is None and not encoded.learned.all():
            path = self._folder / f"{self.name}.mask"
            self._mask = _ArrayWriter(path, np.uint8, self._files)
            for at in range(0, self._num, len(_ONES)):
                self._mask.add(_ONES[: self._num - at])
        self._ids.add(encoded.ids)
        self._starts.add(encoded.starts + self._num)
        if self._mask is not None:
            self._mask.add(encoded.learned)
        self._num += len(encoded.ids)
        self._documents += len(encoded.starts)
        self._num_bytes += encoded.num_bytes

    def close(self) -> dict[str, Any]:
        self._starts.close()
        entry = {
            "tokens": self._num,
            "documents": self._documents,
            "num_bytes": self._num_bytes,
            "ids_sha256": self._ids.close(),
            "mask_sha256": self._mask.close() if self._mask else None,
        }
        if not self._num:
            for path in self._folder.glob(f"{self.name}.*"):
                path.unlink()
        return entry
