"""Which documents share a row? The longest first, each where it leaves the least room.

The lengths are whole numbers up to the length of a row, so all documents of one length
are placed at once.

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (2024), for best-fit
packing of documents. Differs: documents are packed a million at a time, in their order.
"""

import bisect

import numpy as np
from jaxtyping import Int, Int64

_AT_ONCE = 1 << 20
"""Documents packed at a time: a row's documents are near each other on disk."""


def pack(
    lengths: Int[np.ndarray, "documents"], capacity: int
) -> Int64[np.ndarray, "documents"]:
    """Assign documents to rows.

    Args:
      lengths: tokens of each document, from 1 to `capacity`.
      capacity: tokens of a row.

    Returns:
      The row of each document, from 0, without gaps. It depends on the lengths only.

    Example:
      >>> pack(np.array([3, 1, 4, 2]), 5)
      array([1, 0, 0, 1])
    """
    rows, num_rows = np.empty(len(lengths), np.int64), 0
    for first in range(0, len(lengths), _AT_ONCE):
        packed = _best_fit(lengths[first : first + _AT_ONCE], capacity)
        rows[first : first + _AT_ONCE] = packed + num_rows
        num_rows += int(packed.max()) + 1
    return rows


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack all at once.

    Best fit fills one row of the smallest sufficient room with as many documents of a
    length as it takes, then the next row of that room: so do these, in one assignment.
    """
    longest_first = np.argsort(-lengths.astype(np.int64), kind="stable")
    ends = np.flatnonzero(np.diff(lengths[longest_first])) + 1
    open_rows, rows = _OpenRows(capacity), np.empty(len(lengths), np.int64)
    for same in np.split(longest_first, ends):
        length = int(lengths[same[0]])
        while len(same):
            room, found = open_rows.take_best(length, len(same))
            per_row = room // length
            placed = min(len(same), per_row * len(found))
            used = -(-placed // per_row)
            rows[same[:placed]] = found[np.arange(placed) // per_row]
            same = same[placed:]
            last = placed - (used - 1) * per_row
            open_rows.put(room - per_row * length, found[: used - 1])
            open_rows.put(room - last * length, found[used - 1 : used])
            open_rows.put(room, found[used:])
    return rows


class _OpenRows:
    """Rows by the room that is left in them."""

    def __init__(self, capacity: int):
        self._capacity, self._num_rows = capacity, 0
        self._rows: dict[int, np.ndarray] = {}
        self._rooms: list[int] = []

    def take_best(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """The rows of the smallest sufficient room, or new ones for `count`."""
        at = bisect.bisect_left(self._rooms, length)
        if at < len(self._rooms):
            room = self._rooms.pop(at)
            return room, self._rows.pop(room)
        new = self._num_rows + np.arange(-(-count // (self._capacity // length)))
        self._num_rows += len(new)
        return self._capacity, new

    def put(self, room: int, rows: np.ndarray) -> None:
        """Leave rows open with a room."""
        if not room or not len(rows):
            return
        if room in self._rows:
            rows = np.concatenate([self._rows[room], rows])
        else:
            bisect.insort(self._rooms, room)
        self._rows[room] = rows
