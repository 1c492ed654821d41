"""In which order are the active tiles computed: lists of work for a grid.

A row of a tiled matrix has a list of active tiles. A program of the grid computes one
*item*: a row, or a piece of a row that is so long that it would run longer than the
rest of the grid.
"""

import dataclasses

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
    if longest is None:
        longest = max(16, int(np.ceil(2 * active.sum(-1).mean())))
    heads = [
        _list_head(*arrays, longest) for arrays in zip(active, full, mask, strict=True)
    ]
    num_rows = active.shape[1]
    num_split = max(len(head["split_row"]) for head in heads)
    fill = {
        "row": -1,
        "part": -1,
        "part_row": num_split,
        "split_row": num_rows,
        "tile_row": num_rows,
    }
    return Lists(
        **{
            name: _stack([head[name] for head in heads], fill.get(name, 0))
            for name in heads[0]
        }
    )


def _list_head(
    active: np.ndarray, full: np.ndarray, mask: np.ndarray, longest: int
) -> dict[str, np.ndarray]:
    rows, columns = np.nonzero(active)
    order = np.lexsort((columns, ~full[rows, columns], rows))
    rows, columns = rows[order], columns[order]
    counts, fulls = active.sum(1), (active & full).sum(1)
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
        "mask": mask[rows, columns],
    }


def _stack(heads: list[np.ndarray], fill: int) -> np.ndarray:
    width = max(len(head) for head in heads)
    padded = [
        np.pad(head, (0, width - len(head)), constant_values=fill) for head in heads
    ]
    return np.stack(padded).astype(np.int32)
