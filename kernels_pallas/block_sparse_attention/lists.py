"""In which order are the active tiles computed: lists of work for a grid.

A row of a tiled matrix has a list of active tiles. A program of the grid computes one
*item*: a row, or a piece of a row that is so long that it would run longer than the
rest of the grid.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Lists:
    """Items, and the active tiles of each.

    The first dim G of every array is 1 if all heads have the same tiles, otherwise the
    number of heads. Heads with fewer items or tiles than others are padded.

    Attributes:
      row: [G, I], the row of each item, the longest items first; -1 for padding.
      start: [G, I], the first of its tiles in the head's list.
      count: [G, I], the number of its tiles; 0 for a row without active tiles.
      full: [G, I], how many of them, the first ones, need no mask.
      part: [G, I], the partial result that it computes; -1 if the item is a full row.
      part_row: [G, P], the split row of each partial result; Z for padding.
      split_row: [G, Z], the rows that are split; R for padding.
      tile_row: [G, E], the row of each tile, in order; R, the number of rows, for
        padding.
      column: [G, E], the column of each tile.
      mask: [G, E], the tile work's mask of each tile.
    """

    row: np.ndarray
    start: np.ndarray
    count: np.ndarray
    full: np.ndarray
    part: np.ndarray
    part_row: np.ndarray
    split_row: np.ndarray
    tile_row: np.ndarray
    column: np.ndarray
    mask: np.ndarray

    @property
    def num_parts(self) -> int:
        """Partial results of a head, at most."""
        return self.part_row.shape[1]


def make_lists(
    active: np.ndarray, full: np.ndarray, mask: np.ndarray, *, longest: int | None
) -> Lists:
    """List the active tiles of every row.

    Args:
      active: [G, R, C] booleans.
      full: [G, R, C], which of them need no mask.
      mask: [G, R, C], the number of each tile's mask.
      longest: most tiles of an item; None for twice the mean row, and at least 16.

    Returns:
      The lists; in each row full tiles come first, both kinds from left to right.
    """
    heads = []
    for head_active, head_full, head_mask in zip(active, full, mask, strict=True):
        rows, columns = np.nonzero(head_active)
        place = rows, columns
        heads.append(_Tiles(rows, columns, head_full[place], head_mask[place]))
    return _listed(heads, active.shape[1], longest)


def merge_heads(
    lists: Lists, group: int, *, num_rows: int, num_columns: int, longest: int | None
) -> Lists:
    """List what groups of heads have in a row as one row.

    Args:
      lists: of every head, or shared by all.
      group: neighbouring heads of a group; divides G unless that is 1.
      num_rows: R.
      num_columns: C.
      longest: as for `make_lists`, of a group.

    Returns:
      The lists of each group, or one that all groups share. Columns count on from head
      to head: column c of a group's head h is number h C + c.
    """
    heads = [_tiles_of(lists, head, num_rows) for head in range(len(lists.row))]
    groups = []
    for first in range(0, len(heads), group if len(heads) > 1 else 1):
        members = [
            heads[(first + h) % len(heads)].moved(h * num_columns) for h in range(group)
        ]
        groups.append(_Tiles(*map(np.concatenate, zip(*members, strict=True))))
    return _listed(groups, num_rows, longest)


class _Tiles(NamedTuple):
    """The active tiles of one head, or group of heads, in any order."""

    rows: np.ndarray
    columns: np.ndarray
    full: np.ndarray
    mask: np.ndarray

    def moved(self, by: int) -> "_Tiles":
        return self._replace(columns=self.columns + by)


def _tiles_of(lists: Lists, head: int, num_rows: int) -> _Tiles:
    """Read the active tiles of a head from its lists."""
    is_full = np.zeros(lists.column.shape[1], bool)
    for start, full in zip(lists.start[head], lists.full[head], strict=True):
        is_full[start : start + full] = True
    there = lists.tile_row[head] < num_rows
    arrays = lists.tile_row[head], lists.column[head], is_full, lists.mask[head]
    return _Tiles(*(x[there] for x in arrays))


def _listed(heads: list[_Tiles], num_rows: int, longest: int | None) -> Lists:
    if longest is None:
        mean = sum(len(head.rows) for head in heads) / (len(heads) * num_rows)
        longest = max(16, int(np.ceil(2 * mean)))
    listed = [_list_head(head, num_rows, longest) for head in heads]
    num_split = max(len(head["split_row"]) for head in listed)
    fill = {
        "row": -1,
        "part": -1,
        "part_row": num_split,
        "split_row": num_rows,
        "tile_row": num_rows,
    }
    return Lists(
        **{
            name: _stack([head[name] for head in listed], fill.get(name, 0))
            for name in listed[0]
        }
    )


def _list_head(tiles: _Tiles, num_rows: int, longest: int) -> dict[str, np.ndarray]:
    order = np.lexsort((tiles.columns, ~tiles.full, tiles.rows))
    rows, columns, full, mask = (x[order] for x in tiles)
    counts = np.bincount(rows, minlength=num_rows)
    fulls = np.bincount(rows[full], minlength=num_rows)
    starts = np.cumsum(counts) - counts
    pieces = np.maximum(1, -(-counts // longest))
    row = np.repeat(np.arange(len(counts)), pieces)
    first = np.cumsum(pieces) - pieces
    # Pieces of a row differ by at most one tile.
    piece, of = np.arange(len(row)) - first[row], pieces[row]
    begin = counts[row] * piece // of
    count = counts[row] * (piece + 1) // of - begin
    part = np.where(of > 1, np.cumsum(of > 1) - 1, -1)
    by_length = np.argsort(-count, kind="stable")
    items = {
        "row": row,
        "start": starts[row] + begin,
        "count": count,
        "full": np.clip(fulls[row] - begin, 0, count),
        "part": part,
    }
    return {
        **{name: values[by_length] for name, values in items.items()},
        "part_row": np.repeat(np.arange((pieces > 1).sum()), pieces[pieces > 1]),
        "split_row": np.flatnonzero(pieces > 1),
        "tile_row": rows,
        "column": columns,
        "mask": mask,
    }


def _stack(heads: list[np.ndarray], fill: int) -> np.ndarray:
    width = max(len(head) for head in heads)
    padded = [
        np.pad(head, (0, width - len(head)), constant_values=fill) for head in heads
    ]
    return np.stack(padded).astype(np.int32)
