"""How are ids on disk read? By position, so that a lost or changed file is an error.

A memory map of a file that is truncated kills its process (SIGBUS), and one that is
overwritten gives other numbers. Here each read is a system call whose short answer
raises, and blocks whose hashes are known are compared when they are first read.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64
from numpy.typing import DTypeLike

from jaxpar.data.block_hashes import BLOCK_BYTES, BlockHasher, num_blocks

_SCAN_BYTES = 1 << 22
"""Read at a time in a scan: enough for the disk's speed, little memory."""


class ChangedDataError(OSError):
    """A file of the corpus is not what it was when the run began."""


class DiskArray:
    """A 1-D array in a file, of which each slice is read and copied when it is taken.

    The file is opened for each read, so that a corpus of many files needs no more file
    descriptors than threads.

    Example:
      >>> np.arange(5, dtype=np.uint16).tofile("ids.bin")
      >>> ids = DiskArray("ids.bin", np.uint16)
      >>> len(ids), ids[1:3]
      (5, array([1, 2], dtype=uint16))
      >>> os.remove("ids.bin")
    """

    ndim = 1

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: DTypeLike,
        *,
        offset: int = 0,
        length: int | None = None,
        hashes: UInt64[np.ndarray, "blocks"] | None = None,
        remedy: str = "Bring the former file back, or start another run (--out).",
    ):
        """Set up an array; nothing is read but the file's size.

        Args:
          path: the file.
          dtype: of the elements.
          offset: bytes before the first element.
          length: elements; None for all up to the end of the file.
          hashes: of the blocks; None if unknown, until `scan` computes them.
          remedy: what to do if the file has changed, a sentence for people.
        """
        self.remedy = remedy
        self.path, self.dtype, self.offset = Path(path), np.dtype(dtype), offset
        if length is None:
            length = (self.path.stat().st_size - offset) // self.dtype.itemsize
        self.shape = (length,)
        self._hashes: np.ndarray | None = None
        self._is_checked = np.zeros(num_blocks(self.nbytes), bool)
        if hashes is not None:
            self._set_hashes(hashes)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.shape[0] * self.dtype.itemsize

    @property
    def hashes(self) -> UInt64[np.ndarray, "blocks"] | None:
        """Hashes of the blocks; None if they are not known yet."""
        return self._hashes

    def with_hashes(self, hashes: UInt64[np.ndarray, "blocks"]) -> "DiskArray":
        """Make the same array, whose blocks are compared when they are first read."""
        return DiskArray(
            self.path,
            self.dtype,
            offset=self.offset,
            length=len(self),
            hashes=hashes,
            remedy=self.remedy,
        )

    def cut(self, start: int, stop: int) -> "DiskArray":
        """Make an array of some of its elements, without reading them."""
        offset = self.offset + start * self.dtype.itemsize
        return DiskArray(
            self.path,
            self.dtype,
            offset=offset,
            length=stop - start,
            remedy=self.remedy,
        )

    def __getitem__(self, where: slice) -> np.ndarray:
        """Read a slice into memory; its step must be 1.

        Raises:
          ChangedDataError: if the file is shorter than it was, or a block's hash
            differs.
        """
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of '{self.path}' must have step 1, not {step}.")
        size = self.dtype.itemsize
        return self._bytes(start * size, max(start, stop) * size).view(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read all of it into memory."""
        if copy is False:
            raise ValueError(f"'{self.path}' is on disk: an array of it is a copy.")
        return self[:].astype(dtype or self.dtype, copy=False)

    def scan(self, see: Callable[[np.ndarray], object]) -> None:
        """Read all of it once, in pieces, and keep the hashes of its blocks.

        Args:
          see: called with the bytes of each piece, in order.

        Raises:
          ChangedDataError: as in a read.
        """
        hasher = BlockHasher()
        for start in range(0, self.nbytes, _SCAN_BYTES):
            piece = self._bytes(start, min(start + _SCAN_BYTES, self.nbytes))
            hasher.update(piece)
            see(piece)
        if self._hashes is None:
            self._set_hashes(hasher.values())

    def _set_hashes(self, hashes: np.ndarray) -> None:
        assert len(hashes) == len(self._is_checked), "one hash for each block"
        self._hashes = hashes

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        """Read bytes of the array, as uint8."""
        first, last = start // BLOCK_BYTES, num_blocks(stop)
        if self._hashes is None or self._is_checked[first:last].all():
            return self._read(start, stop)
        begin = first * BLOCK_BYTES
        whole = self._read(begin, min(last * BLOCK_BYTES, self.nbytes))
        self._compare(whole, first)
        return whole[start - begin : stop - begin]

    def _compare(self, data: np.ndarray, first: int) -> None:
        """Compare blocks, from the first on, with their hashes."""
        assert self._hashes is not None
        hasher = BlockHasher()
        hasher.update(data)
        now = hasher.values()
        then = self._hashes[first : first + len(now)]
        if (now != then).any():
            block = first + int(np.flatnonzero(now != then)[0])
            at = self.offset + block * BLOCK_BYTES
            raise ChangedDataError(
                f"'{self.path}' was changed since the run began: block {block}, from "
                f"byte {at:,}, has another hash. {self.remedy}"
            )
        self._is_checked[first : first + len(now)] = True

    def _read(self, start: int, stop: int) -> np.ndarray:
        data = np.empty(max(stop - start, 0), np.uint8)
        file, done = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), 0
        try:
            while done < len(data):
                at = self.offset + start + done
                got = os.preadv(file, [data[done:]], at)
                if not got:
                    raise ChangedDataError(
                        f"'{self.path}' ends at byte {os.fstat(file).st_size:,}, but "
                        f"{len(data) - done:,} bytes from {at:,} on were there when "
                        f"it was opened: it was truncated. {self.remedy}"
                    )
                done += got
        finally:
            os.close(file)
        return data
