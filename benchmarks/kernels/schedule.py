"""How long do the longest and the mean multiprocessor work on a kernel's programs?

The lists of tiles are known before anything runs, so a host can replay how a grid is
scheduled: a multiprocessor that becomes free starts the next program. Times are in
tiles, all of the same length.
"""

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

from kernels_pallas.block_sparse_attention.lists import Lists

MULTIPROCESSORS = 132
"""Of an H200; a program's registers leave no room for a second one."""


@dataclasses.dataclass(frozen=True)
class Spans:
    """When the last program ends, over the mean of all multiprocessors.

    Attributes:
      by_row: of a grid in the order of the sequence.
      longest_first: of the grid in the order of the lists.
      persistent: of one program for each multiprocessor, which computes the items
        of the lists whose numbers are its own, and every 132nd after it.
    """

    by_row: float
    longest_first: float
    persistent: float

    @classmethod
    def of(cls, lists: Lists, heads: int, *, start: float = 0.0) -> "Spans":
        """Replay a kernel.

        Args:
          lists: of its rows or columns.
          heads: of all sequences of the batch; a multiple of the lists'.
          start: tiles in whose time a program starts and ends. A persistent program
            pays it once, as if all of it hid behind the item before.
        """
        copies = heads // len(lists.row)
        ordered = np.concatenate([lists.count] * copies).T.ravel()
        by_row = np.argsort(lists.row, axis=1, kind="stable")
        in_sequence = np.take_along_axis(lists.count, by_row, 1)
        in_sequence = np.concatenate([in_sequence] * copies).T.ravel()
        mean = ordered.sum() / MULTIPROCESSORS
        return cls(
            span(in_sequence + start) / mean,
            span(ordered + start) / mean,
            (strided_span(ordered) + start) / mean,
        )


def span(times: Iterable[float]) -> float:
    """When the last program ends, if each goes to the first free multiprocessor."""
    free_at = [0.0] * MULTIPROCESSORS
    for time in times:
        heapq.heapreplace(free_at, free_at[0] + time)
    return max(free_at)


def strided_span(times: np.ndarray) -> float:
    """When the last of as many programs as multiprocessors ends."""
    padded = np.pad(times, (0, -len(times) % MULTIPROCESSORS))
    return float(padded.reshape(-1, MULTIPROCESSORS).sum(0).max())
