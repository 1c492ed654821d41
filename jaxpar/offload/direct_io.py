"""How are bytes read from disk and written to it, around the page cache?

The state is read once a step and is larger than memory: cached pages would only push
out others. Where a file system has no O_DIRECT, its cache is used.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ALIGN = 4096
"""Bytes that offsets, sizes and addresses are multiples of."""


def padded(num_bytes: int) -> int:
    """The least multiple of `ALIGN` that is not smaller."""
    return -(-num_bytes // ALIGN) * ALIGN


def aligned_buffer(num_bytes: int) -> np.ndarray:
    """Memory for `read` and `write`; uint8, of the padded size."""
    return np.frombuffer(mmap.mmap(-1, padded(max(1, num_bytes))), np.uint8)


def allocate(path: Path, num_bytes: int) -> None:
    """Make a file of that size, whose blocks are on the disk.

    Raises:
      OSError: if the disk is full; it names the file.
    """
    with _naming(path, "allocating"):
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(number, 0, num_bytes)
        finally:
            os.close(number)


def read(path: Path, offset: int, into: np.ndarray) -> None:
    """Fill a buffer from a file.

    Args:
      path: the file.
      offset: where to begin; a multiple of `ALIGN`.
      into: a part of an `aligned_buffer`, of a multiple of `ALIGN` bytes.

    Raises:
      OSError: if it can't be read, or ends before; it names the file.
    """
    _all(path, os.O_RDONLY, os.preadv, offset, into)


def write(path: Path, offset: int, data: np.ndarray) -> None:
    """Write a buffer into a file that is there; arguments as for `read`.

    Raises:
      OSError: if it can't be written; it names the file.
    """
    _all(path, os.O_RDWR, os.pwritev, offset, data)


def sync(path: Path) -> None:
    """Return when what was written to a file, or a folder's names, are on the disk."""
    with _naming(path, "syncing"):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _all(path: Path, flags: int, move: Callable, offset: int, data: np.ndarray) -> None:
    what = "reading" if flags == os.O_RDONLY else "writing"
    with _naming(path, what):
        number = _opened(path, flags)
        try:
            view, done = memoryview(data), 0
            while done < len(view):
                moved = move(number, [view[done:]], offset + done)
                if not moved:
                    raise OSError(errno.EIO, f"it ends {len(view) - done} bytes early")
                done += moved
        finally:
            os.close(number)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


@contextlib.contextmanager
def _naming(path: Path, what: str) -> Iterator[None]:
    """Errors of the operating system say what was done with which file."""
    try:
        yield
    except OSError as error:
        said = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"{said}, {what} the state that is on disk (offload); its last whole step "
            "is intact",
            str(path),
        ) from error
