"""Which leaf does a tile belong to, and how are tiles' numbers summed per leaf?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

ROW = 256
"""Numbers that are summed at a time."""


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The leaf of each tile, for trust ratios.

    Attributes:
      of_tiles: the leaf number of each tile, ascending; integers, [tiles].
      num: leaves.
      axes: mesh axes that leaves are sharded over, if a bucket is one device's shard:
        squares are summed over them, in manual mode.
    """

    of_tiles: np.ndarray
    num: int
    axes: tuple[str, ...] = ()

    def total(self, numbers: jax.Array) -> jax.Array:
        """Sum numbers over each leaf's tiles, on all devices.

        In rows of 256, in the same order on every device and in every run: a scatter
        would add in any order on a GPU, and replicas would diverge.

        Args:
          numbers: one per tile; fp32, [tiles].

        Returns:
          One number per leaf; 0 for a leaf without tiles. fp32, [num].

        Example:
          >>> Leaves(np.array([0, 0, 2]), 3).total(jnp.array([1.0, 2.0, 3.0]))
          Array([3., 0., 3.], dtype=float32)
        """
        counts = np.bincount(self.of_tiles, minlength=self.num)
        while True:
            ends, rows = np.cumsum(counts), np.maximum(1, -(-counts // ROW))
            owners = np.repeat(np.arange(self.num), rows)
            within = np.arange(len(owners)) - (np.cumsum(rows) - rows)[owners]
            first = jnp.asarray((ends - counts)[owners] + ROW * within, jnp.int32)
            places = first[:, None] + jnp.arange(ROW, dtype=jnp.int32)
            terms = numbers.at[places].get(mode="clip")
            is_there = places < jnp.asarray(ends[owners], jnp.int32)[:, None]
            numbers = jnp.where(is_there, terms, 0.0).sum(1)
            if len(owners) == self.num:
                break
            counts = rows
        return jax.lax.psum(numbers, self.axes) if self.axes else numbers
