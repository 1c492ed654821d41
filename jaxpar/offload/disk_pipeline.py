"""How does an update of what is on disk read, compute and write at once?

Pieces go around a ring of buffers: while one is computed, the next are read and the
last are written.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxpar.offload.direct_io import aligned_buffer, padded, read, sync, write
from jaxpar.offload.disk_files import LeafOnDisk, LocalShard

BUFFERS = 5
"""Two are read, one computed, two written."""

_STEP = 4096
"""Pieces have a multiple of so many elements, so that any dtype's are aligned."""

_LARGEST = 4
"""Bytes of an element of masters and moments."""

_Jobs = list[concurrent.futures.Future]

Transfer = tuple[Path, int, np.ndarray]
"""A file, where to begin, and the memory."""


@dataclasses.dataclass(frozen=True)
class DiskPiece:
    """A range of a shard's elements, of all arrays of a leaf.

    Attributes:
      leaf: the leaf.
      shard: of it.
      start: the first element.
      stop: the one after the last.
      compute: updates these elements of the arrays, in place. It is given them in the
        order of `LeafOnDisk.stored`, and then that of `grads`.
      grads: an array of the shard that is read beside them: its file and dtype.
    """

    leaf: LeafOnDisk
    shard: LocalShard
    start: int
    stop: int
    compute: Callable[["DiskPiece", list[np.ndarray]], None]
    grads: tuple[Path, np.dtype] | None = None

    def arrays(self, buffer: np.ndarray) -> list[np.ndarray]:
        """The elements in a buffer, by array."""
        size = self.stop - self.start
        pairs = zip(self._parts(buffer), self._dtypes, strict=True)
        return [part.view(dtype)[:size] for part, dtype in pairs]

    def reads(self, version: Path, buffer: np.ndarray) -> list[Transfer]:
        """What is read: all but the copy, which is only written."""
        every = list(zip(self._files(version), self._parts(buffer), strict=True))
        own = len(self.leaf.arrays)
        last = every[-1:] if self.grads else []
        return [(*place, part) for place, part in [*every[:own], *last]]

    def writes(self, version: Path, buffer: np.ndarray) -> list[Transfer]:
        """What is written: all but the gradients."""
        pairs = zip(self._files(version), self._parts(buffer), strict=True)
        every = [(*place, part) for place, part in pairs]
        return every[: len(self.leaf.stored)]

    def _files(self, version: Path) -> Iterator[tuple[Path, int]]:
        """By array, its file and where these elements begin there."""
        for number, array in enumerate(self.leaf.stored):
            offset = self.leaf.offset(self.shard, number)
            file = self.leaf.file(version, self.shard)
            yield file, offset + self.start * array.dtype.itemsize
        if self.grads:
            file, dtype = self.grads
            yield file, self.start * np.dtype(dtype).itemsize

    def _parts(self, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """By array, a part of a buffer."""
        begin = 0
        for dtype in self._dtypes:
            size = padded((self.stop - self.start) * dtype.itemsize)
            yield buffer[begin : begin + size]
            begin += size

    @property
    def _dtypes(self) -> list[np.dtype]:
        beside = [np.dtype(self.grads[1])] if self.grads else []
        return [*(array.dtype for array in self.leaf.stored), *beside]


def ranges(elements: int, most: int) -> list[tuple[int, int]]:
    """Cut a shard's elements into ranges of at most so many, or a few more."""
    size = max(_STEP, most // _STEP * _STEP)
    return [(start, min(start + size, elements)) for start in range(0, elements, size)]


class DiskPipeline:
    """Reads, updates and writes pieces; its buffers and threads are used again.

    Args:
      arrays: most arrays of a leaf.
      elements: most elements of a piece.
    """

    def __init__(self, arrays: int, elements: int):
        size = arrays * padded(max(_STEP, elements) * _LARGEST)
        self.buffers = [aligned_buffer(size) for _ in range(BUFFERS)]
        self._pool = concurrent.futures.ThreadPoolExecutor(
            4, thread_name_prefix="jaxpar-disk"
        )

    def run(self, pieces: Sequence[DiskPiece], source: Path, target: Path) -> None:
        """Update pieces of a version into another one; returns when it is on disk.

        Args:
          pieces: what is updated; all that the versions hold.
          source: the version that is read.
          target: the version that is written.

        Raises:
          OSError: if the disk fails; the version that is read is intact.
        """
        free, left = collections.deque(self.buffers), collections.deque(pieces)
        reading: collections.deque[tuple[DiskPiece, np.ndarray, _Jobs]]
        writing: collections.deque[tuple[np.ndarray, _Jobs]]
        reading, writing = collections.deque(), collections.deque()
        try:
            while left or reading:
                while left and free:
                    piece, buffer = left.popleft(), free.popleft()
                    jobs = self._moves(read, piece.reads(source, buffer))
                    reading.append((piece, buffer, jobs))
                if reading:
                    piece, buffer, jobs = reading.popleft()
                    _finish(jobs)
                    piece.compute(piece, piece.arrays(buffer))
                    jobs = self._moves(write, piece.writes(target, buffer))
                    writing.append((buffer, jobs))
                if len(writing) > 2 or not reading:
                    buffer, jobs = writing.popleft()
                    _finish(jobs)
                    free.append(buffer)
        finally:  # Threads may still use the buffers.
            jobs = [job for *_, own in (*reading, *writing) for job in own]
            concurrent.futures.wait(jobs)
        for _, jobs in writing:
            _finish(jobs)
        files = {piece.leaf.file(target, piece.shard) for piece in pieces}
        _finish([self._pool.submit(sync, file) for file in files])

    def _moves(
        self,
        move: Callable[[Path, int, np.ndarray], None],
        transfers: Sequence[Transfer],
    ) -> _Jobs:
        return [self._pool.submit(move, *transfer) for transfer in transfers]


def _finish(jobs: _Jobs) -> None:
    for job in jobs:
        job.result()
