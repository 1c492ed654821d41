"""How fast is a disk, as offload uses it: large pieces, without the page cache?"""

import concurrent.futures
import dataclasses
import itertools
import tempfile
import time
from pathlib import Path

from jaxpar.offload.direct_io import aligned_buffer, allocate, read, sync, write

_PIECE = 8 << 20


@dataclasses.dataclass(frozen=True)
class DiskSpeed:
    """Rates in bytes per second.

    Attributes:
      read: of reading alone.
      write: of writing alone.
      both: of reading and writing at once, added up.
    """

    read: float
    write: float
    both: float

    def __str__(self) -> str:
        parts = (("reads", self.read), ("writes", self.write), ("both", self.both))
        return ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in parts)


def measure_disk(
    folder: Path, num_bytes: int = 1 << 29, *, threads: int = 4
) -> DiskSpeed:
    """Measure a folder's disk, with two files that are removed.

    Args:
      folder: a folder that is there.
      num_bytes: size of each file.
      threads: that read or write at once.

    Raises:
      OSError: if the disk is full or fails; it names the file.
    """
    starts = range(0, num_bytes, _PIECE)
    buffers = itertools.cycle([aligned_buffer(_PIECE) for _ in range(2 * threads)])
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="jaxpar-disk-") as made,
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
    ):
        files = [Path(made, name) for name in ("one", "other")]
        for file in files:
            allocate(file, len(starts) * _PIECE)

        def seconds(*calls: tuple) -> float:
            began = time.perf_counter()
            jobs = [
                pool.submit(move, file, start, next(buffers))
                for start in starts
                for move, file in calls
            ]
            for job in jobs:
                job.result()
            for move, file in calls:
                if move is write:
                    sync(file)
            return time.perf_counter() - began

        one, other = files
        seconds(
            (write, one), (write, other)
        )  # Blocks that were never written are zero.
        moved = len(starts) * _PIECE
        return DiskSpeed(
            read=moved / seconds((read, one)),
            write=moved / seconds((write, one)),
            both=2 * moved / seconds((read, one), (write, other)),
        )
