"""How are ids on disk read? By position, so that a lost or changed file is an error.

A memory map of a file that is truncated kills its process (SIGBUS), and one that is
overwritten gives other numbers. Here each read is a system call, which raises where
the file has another size or time than when it was opened.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

_SCAN_BYTES = 1 << 22
"""Read at a time in a scan: enough for the disk's speed, little memory."""


class ChangedDataError(OSError):
    """A file of the corpus was written since it was opened."""


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
        remedy: str = "Bring the former file back, or start another run (--out).",
    ):
        """Set up an array; nothing is read but the file's size and time.

        Args:
          path: the file.
          dtype: of the elements.
          offset: bytes before the first element.
          length: elements; None for all up to the end of the file.
          remedy: what to do if the file has changed, a sentence for people.
        """
        self.path, self.dtype, self.offset = Path(path), np.dtype(dtype), offset
        self._stat, self._remedy = self.path.stat(), remedy
        if length is None:
            length = (self._stat.st_size - offset) // self.dtype.itemsize
        self.shape = (length,)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.shape[0] * self.dtype.itemsize

    def cut(self, start: int, stop: int) -> "DiskArray":
        """Make an array of some of its elements, without reading them."""
        part = copy.copy(self)
        part.offset += start * self.dtype.itemsize
        part.shape = (stop - start,)
        return part

    def __getitem__(self, where: slice) -> np.ndarray:
        """Read a slice into memory; its step must be 1.

        Raises:
          ChangedDataError: if the file has another size or time than when it was
            opened.
        """
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of '{self.path}' must have step 1, not {step}.")
        size = self.dtype.itemsize
        return self._read(start * size, max(start, stop) * size).view(self.dtype)

    def scan(self, see: Callable[[np.ndarray], object]) -> None:
        """Read all of it once, in pieces.

        Args:
          see: called with the bytes of each piece, in order.

        Raises:
          ChangedDataError: as in a read.
        """
        for start in range(0, self.nbytes, _SCAN_BYTES):
            see(self._read(start, min(start + _SCAN_BYTES, self.nbytes)))

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Read bytes of the array, as uint8."""
        data = np.empty(max(stop - start, 0), np.uint8)
        file, done = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC), 0
        try:
            self._require_same(os.fstat(file))
            while done < len(data):
                got = os.preadv(file, [data[done:]], self.offset + start + done)
                if not got:  # Truncated since the line above.
                    self._require_same(os.fstat(file))
                    raise EOFError(f"'{self.path}' gave no bytes at {start + done:,}.")
                done += got
        finally:
            os.close(file)
        return data

    def _require_same(self, now: os.stat_result) -> None:
        then = self._stat
        if (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns):
            return
        size = f"still {now.st_size:,} bytes"
        if now.st_size != then.st_size:
            size = f"{now.st_size:,} bytes, before {then.st_size:,}"
        raise ChangedDataError(
            f"'{self.path}' was written since it was opened; it has {size}. "
            f"{self._remedy}"
        )
