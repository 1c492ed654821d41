"""How does one pass compute dq too: each step adds its share in global memory.

The scores' cotangents of both warpgroups meet in shared memory. Each warpgroup
multiplies all of them with its half of the keys' columns, and the copy engine adds the
fp32 result to dq, in the order in which programs get there.

Source: Shah et al., "FlashAttention-3" (2024), section B.1.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.block_sparse_attention.mosaic.backward_program import (
    OTHERS,
    Parts,
)
from kernels_pallas.block_sparse_attention.mosaic.common import (
    ROWS,
    WARPGROUPS,
    Build,
    accumulator,
    tiled_smem,
)


class QuerySums:
    """What a program of the dk/dv pass does for dq.

    Args:
      parts: of the program, with a reference named "dq".
    """

    def __init__(self, parts: Parts):
        self.parts, self.build, self.item = parts, parts.build, parts.item

    @staticmethod
    def width(build: Build) -> int:
        """Columns of dq that a warpgroup computes."""
        return build.size // WARPGROUPS

    @classmethod
    def memory(cls, build: Build) -> dict[str, Any]:
        """Make its shared memory."""
        columns = cls.width(build)
        halved = functools.partial(
            tiled_smem,
            dtype=build.dtype,
            # A tile of keys is no wider than half of them; ds must be tiled alike.
            width=min(128, columns * jnp.dtype(build.dtype).itemsize),
        )
        return {
            "k": halved(WARPGROUPS, ROWS, build.size),
            "ds": halved(WARPGROUPS, ROWS, OTHERS),
            "dq": tiled_smem(WARPGROUPS, OTHERS, columns, dtype=jnp.float32),
        }

    @staticmethod
    def barriers() -> dict[str, Any]:
        """Make its barriers."""
        both = plgpu.Barrier(num_arrivals=WARPGROUPS)
        return {"ds": both, "ds_used": both}

    def start(self) -> None:
        """Wait for the other warpgroup's keys too; `ds` is free to begin with."""
        other = WARPGROUPS - 1 - self.item.wg
        plgpu.barrier_wait(self.parts.barriers["k"].at[other])
        plgpu.barrier_arrive(self.parts.barriers["ds_used"])

    def put(self, ds: jax.Array) -> None:
        """Show the other warpgroup a step's cotangents of the scores, [64, 64]."""
        plgpu.barrier_wait(self.parts.barriers["ds_used"])
        self.parts.mine("ds")[...] = ds.astype(self.build.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.parts.barriers["ds"])

    def add(self, slot: Any) -> None:
        """Add a step's share to dq; waits for all matmuls."""
        memory, width = self.parts.memory, self.width(self.build)
        columns = pl.ds(self.parts.wg * width, width)
        plgpu.barrier_wait(self.parts.barriers["ds"])

        def multiply(acc: Any) -> jax.Array:
            for keys in range(WARPGROUPS):
                operand = memory["k"].at[keys, :, columns]
                plgpu.wgmma(acc, memory["ds"].at[keys].T, operand)
            return acc[...]

        share = pl.run_scoped(multiply, accumulator(OTHERS, width))
        plgpu.barrier_arrive(self.parts.barriers["ds_used"])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged = self.parts.mine("dq")
        staged[...] = share * (self.build.scale * math.log(2))
        plgpu.commit_smem()
        listed, item = self.parts.ring.listed(slot), self.item
        place = (item.row, pl.ds(listed.first, OTHERS), listed.head, columns)
        there = self.parts.refs["dq"]
        if self.build.interprets:  # It has no sums of the copy engine.
            plgpu.copy_smem_to_gmem(staged, there.at[item.place, *place])
        else:
            plgpu.copy_smem_to_gmem(staged, there.at[place], reduction_op="add")

    def finish(self) -> None:
        """Wait until the keys and all copies are done with."""
        plgpu.barrier_wait(self.parts.barriers["ds_used"])
        plgpu.wait_smem_to_gmem(0)


def sum_columns(dq_CBTNH: jax.Array, active_NTC: jax.Array) -> jax.Array:
    """Sum what the interpreter writes for each column of tiles.

    Args:
      dq_CBTNH: of each tile of keys; anything where it has no tile of these queries.
      active_NTC: which tiles are active; one head if all share them.
    """
    tile = -(-dq_CBTNH.shape[2] // active_NTC.shape[1])
    is_there = active_NTC.repeat(tile, 1)[:, : dq_CBTNH.shape[2]].transpose(2, 1, 0)
    return jnp.where(is_there[:, None, :, :, None], dq_CBTNH, 0.0).sum(0)
