"""What do a kernel's programs read of the tile work: lists, in few packed arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_sparse_attention.lists import Lists
from kernels_pallas.block_sparse_attention.tile_work import TileWork

ROW, START, COUNT, FULL, PART = range(5)
COLUMN, MASK = range(2)


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


def device_lists(
    lists: Lists, work: TileWork, num_heads: int, first_head: Any, *, has_limits: bool
) -> DeviceLists:
    """Pack a tile work's lists.

    Args:
      lists: the tile work's rows or columns.
      work: the work of the kernels.
      num_heads: of the present queries.
      first_head: the first present head of the tile work's; None if all are present.
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
