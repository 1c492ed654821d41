"""What do a kernel's programs read of the tile work: lists, in few packed arrays."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_sparse_attention.lists import Lists, merge_heads
from kernels_pallas.block_sparse_attention.tile_work import TileWork

ROW, START, COUNT, FULL, PART = range(5)
COLUMN, MASK = range(2)


PROGRAMS = 4 * 132
"""Of a kernel: four for each multiprocessor of an H200, so that few of them idle."""


@dataclasses.dataclass(frozen=True)
class DeviceLists:
    """Lists of work, for the present heads.

    Attributes:
      items: [G, I, 5] of `Lists`: row, start, count, full and part.
      tiles: [G, E, 2]: column and mask.
      words: [M, tile.q / b], the masks; bit j of a word is for block j of keys.
      is_shared: whether all heads share the lists, with G = 1.
      num_parts: partial results of a head.
    """

    items: jax.Array
    tiles: jax.Array
    words: jax.Array
    is_shared: bool
    num_parts: int

    @property
    def num_items(self) -> int:
        """Items of a head."""
        return self.items.shape[1]


@functools.lru_cache(maxsize=64)
def group_columns(work: TileWork, group: int, copies: int) -> Lists:
    """List the columns of all query heads that share keys as one.

    Args:
      work: the work of the kernels.
      group: query heads that share a key head.
      copies: key heads, times rows of the batch.

    Returns:
      Lists whose tiles count on from head to head. Columns are also split where there
      would be fewer than `PROGRAMS` items, but not below 16 tiles or a head's mean.
    """
    if group == 1:
        return work.columns
    mean = work.active_tiles * work.tiles_q
    longest = work.longest or max(16, math.ceil(2 * group * mean))
    share = math.ceil(group * mean * work.tiles_k * copies / PROGRAMS)
    return merge_heads(
        work.columns,
        group,
        num_rows=work.tiles_k,
        num_columns=work.tiles_q,
        longest=min(longest, max(16, math.ceil(mean), share)),
    )


def device_lists(
    lists: Lists, work: TileWork, num_heads: int, first_head: Any, *, has_limits: bool
) -> DeviceLists:
    """Pack a tile work's lists.

    Args:
      lists: the tile work's rows or columns.
      work: the work of the kernels.
      num_heads: present heads of the lists: of queries, or groups of them.
      first_head: the first present one; None if all are present.
      has_limits: whether every tile needs a mask.

    Returns:
      The lists; without active tiles they have one tile, which no item uses.
    """
    full = np.zeros_like(lists.full) if has_limits else lists.full
    of_items = (lists.row, lists.start, lists.count, full, lists.part)
    items = np.stack(of_items, axis=-1)
    tiles = np.stack([lists.column, lists.mask], axis=-1)
    if tiles.shape[1] == 0:
        tiles = np.zeros((len(tiles), 1, 2), np.int32)
    bits = 1 << np.arange(work.masks.shape[2], dtype=np.int64)
    words = (work.masks * bits).sum(-1).astype(np.int32)
    is_shared = len(items) == 1

    def here(x: np.ndarray) -> jax.Array:
        if is_shared or first_head is None:
            return jnp.asarray(x)
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), first_head, num_heads)

    words = jnp.asarray(words)
    return DeviceLists(here(items), here(tiles), words, is_shared, lists.num_parts)
