"""Which rows of a stream do batches leave out, and where are the others?"""

import bisect
import itertools
from collections.abc import Iterable


class LeftOut:
    """Rows of a stream that no batch contains, as sorted intervals that don't touch.

    Args:
      intervals: (start, stop) pairs of rows, counted from the start of the stream, in
        any order; stop is the first row after them.

    Raises:
      ValueError: if a start is negative, or a stop is below its start.

    Example:
      >>> left_out = LeftOut([(2, 4), (3, 5)])
      >>> [left_out.row(kept) for kept in range(4)], left_out.num_kept(4)
      ([0, 1, 5, 6], 2)
    """

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()):
        merged: list[list[int]] = []
        for start, stop in sorted(intervals):
            if not 0 <= start <= stop:
                raise ValueError(
                    f"intervals: ({start}, {stop}) must be a start of at least 0 and a "
                    "stop that is not below it; give (first row, last row + 1)."
                )
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(stop, merged[-1][1])
            elif start < stop:
                merged.append([start, stop])
        self._starts = [start for start, _ in merged]
        # Rows left out before each interval, and in all.
        self._totals = [
            0,
            *itertools.accumulate(stop - start for start, stop in merged),
        ]
        self._kept_before = [
            start - total
            for start, total in zip(self._starts, self._totals[:-1], strict=True)
        ]

    def row(self, kept: int) -> int:
        """Return the row of the stream that `kept` rows that are not left out precede.

        Args:
          kept: a number of rows, from 0.
        """
        return kept + self._totals[bisect.bisect_right(self._kept_before, kept)]

    def num_kept(self, row: int) -> int:
        """Count the rows before `row` that are not left out.

        Args:
          row: of the stream; the count is of rows [0, row).
        """
        index = bisect.bisect_left(self._starts, row)
        if not index:
            return row
        kept_before, total = self._kept_before[index - 1], self._totals[index]
        return max(kept_before, row - total)
