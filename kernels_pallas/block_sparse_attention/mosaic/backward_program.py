"""What do both programs of the backward pass share?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.block_sparse_attention.mosaic.common import (
    LAYOUT,
    LISTED,
    ROWS,
    WARPGROUPS,
    Build,
    Item,
    Listed,
    Ring,
    tiled_smem,
)
from kernels_pallas.block_sparse_attention.mosaic.masks import Piece, visible

OTHERS = 64
"""Tokens of the other side per step."""

LSE, DELTA = range(2)
"""For each query: the logarithm of its sum, and delta."""

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a pass holds, fetches and computes.

    Attributes:
      own: operands that a warpgroup holds, and their dtypes.
      shared: operands that are fetched step by step; the first is released last.
      results: names of the results, and the operand of the same length.
      tile: tokens of a result's tile.
      products: matmuls per tile.
      held: those of `own` that are left operands in registers: 64 x 64 x 16 with both
        operands in shared memory takes all that can be read of it in the time.
      memory: further shared memory.
      barriers: further barriers.
      outs: further results.
    """

    own: dict[str, Any]
    shared: dict[str, Any]
    results: dict[str, str]
    tile: int
    products: int
    held: tuple[str, ...] = ()
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    barriers: dict[str, Any] = dataclasses.field(default_factory=dict)
    outs: dict[str, Any] = dataclasses.field(default_factory=dict)


def call(
    build: Build, given: Arrays, what: Pass, run: Callable[["Parts"], None]
) -> list[jax.Array]:
    """Run a program for every item.

    Args:
      build: for these operands.
      given: the operands; unused ones are dropped.
      what: the pass.
      run: the program.

    Returns:
      The results; if rows are split, also partial ones; and the further results.
    """
    own = {name: dtype for name, dtype in what.own.items() if name in given}
    shared = {name: dtype for name, dtype in what.shared.items() if name in given}
    needed = {*own, *shared, "lens", "dq"}
    given = {name: x for name, x in given.items() if name in needed}
    num_parts, size = build.lists.num_parts, build.size
    outs = {}
    for name, like in what.results.items():
        batch, tokens = given[like].shape[:2]
        shape = (batch, tokens, build.grid_heads, size)
        outs[name] = jax.ShapeDtypeStruct(shape, build.dtype)
    for name in what.results if num_parts else ():
        shape = (build.batch, build.grid_heads, num_parts, what.tile, size)
        outs[f"{name}_parts"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    outs |= what.outs

    def smem(dtype: Any, places: int, tokens: int) -> Any:
        if dtype == build.dtype:
            return tiled_smem(places, tokens, size, dtype=dtype)
        both = (2,) if dtype == jnp.float32 else ()
        return plgpu.SMEM((places, *both, tokens), dtype)

    memory = {name: smem(dtype, WARPGROUPS, ROWS) for name, dtype in own.items()}
    memory |= Ring.listed_memory(build.stages) | {
        name: smem(dtype, build.stages, OTHERS) for name, dtype in shared.items()
    }
    memory |= what.memory
    if build.interprets:
        memory["staged"] = plgpu.SMEM((WARPGROUPS, ROWS, OTHERS), build.dtype)
    names, with_listed = tuple(shared), next(iter(shared))
    barriers = Ring.barriers(names, with_listed, build.stages)
    barriers |= {name: plgpu.Barrier(num_barriers=WARPGROUPS) for name in own}
    barriers |= what.barriers

    def program(refs: dict, memory: dict, barriers: dict) -> None:
        ring = Ring(names, with_listed, memory, barriers, build.stages)
        run(Parts(build, refs, memory, barriers, tuple(own), what.held, ring))

    name = "_".join([*what.results, *(("dq",) if "dq" in {*given, *what.outs} else ())])
    return build.call(name, what.products, given, outs, memory, barriers, program)


class Parts:
    """The common parts of both programs."""

    def __init__(
        self,
        build: Build,
        refs: dict[str, Any],
        memory: dict[str, Any],
        barriers: dict[str, Any],
        own: tuple[str, ...],
        held: tuple[str, ...],
        ring: Ring,
    ):
        self.build, self.work, self.refs = build, build.work, refs
        self.held = held
        self.memory, self.barriers = memory, barriers
        self.own, self.ring = own, ring
        self.item = Item.read(refs, build)

    def places(
        self, tokens: Any, head: Any, names: tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        """Some tokens of operands, of a head of the queries and its keys."""
        item = self.item

        def place(name: str) -> Any:
            ref = self.refs[name]
            if name.startswith("segments"):
                return ref.at[item.row, tokens]
            if name == "of_rows":
                return ref.at[item.row, head, :, tokens]
            of_keys = name in ("k", "v")
            return ref.at[item.row, tokens, item.kv_head if of_keys else head]

        return {name: place(name) for name in names or self.ring.names}

    def fetch_own(self, tokens: Any) -> None:
        """Fetch the operands that this warpgroup holds."""
        wg = self.item.wg
        if "wg" in self.memory:
            self.memory["wg"][wg] = wg
        for name, source in self.places(tokens, self.item.head, self.own).items():
            here, loaded = self.memory[name].at[wg], self.barriers[name].at[wg]
            plgpu.copy_gmem_to_smem(source, here, loaded)
        for name in self.own:
            plgpu.barrier_wait(self.barriers[name].at[wg])

    @property
    def wg(self) -> Any:
        """This warpgroup.

        Read back where a pass needs the registers that addresses would occupy over its
        loop: those made of a loaded number are computed where they are used.
        """
        wg = self.item.wg
        return self.memory["wg"][wg] if "wg" in self.memory else wg

    def load_held(self) -> dict[str, jax.Array]:
        """Load the operands that stay in registers."""
        if self.build.interprets:  # It has no matmuls of registers.
            return {}
        return {name: plgpu.load(self.mine(name), layout=LAYOUT) for name in self.held}

    def left(self, name: str, held: dict[str, jax.Array]) -> Any:
        """A left operand: in registers or in shared memory."""
        return held[name] if name in held else self.mine(name)

    def mine(self, name: str) -> Any:
        """An operand that this warpgroup holds, in shared memory."""
        return self.memory[name].at[self.wg]

    def sources(self, step: Any, tile: int) -> dict[str, Any]:
        """What is fetched for a step."""
        per_tile = jnp.int32(tile // OTHERS)
        other, head, mask = self.item.other(lax.div(step, per_tile))
        in_tile = lax.rem(step, per_tile) * OTHERS
        first = other * tile + in_tile
        listed = Listed(first, in_tile, head, mask, self.item.length)
        return self.places(pl.ds(first, OTHERS), head) | {LISTED: listed}

    def loop(self, step: Callable[..., None], tile: int) -> None:
        """Run the steps of the item: first those that need no mask."""
        per_tile = tile // OTHERS

        def run(masked: bool) -> Callable[[Any, Any], Any]:
            def body(_: Any, slot: Any) -> Any:
                if self.build.stages == 1:
                    # Of a known 0, all addresses would be held over the loop.
                    slot = self.wg - self.item.wg
                step(slot, masked=masked)
                return self.ring.next(slot)

            return body

        slot, full = jnp.int32(0), 0
        if not self.item.has_limits:
            full = self.item.full * per_tile
            slot = lax.fori_loop(0, full, run(masked=False), slot)
        lax.fori_loop(full, self.item.count * per_tile, run(masked=True), slot)

    def shown(self, piece: Piece, listed: Listed, segments: Any) -> jax.Array:
        """Which scores of a step are visible."""
        item, refs = self.item, self.refs
        return visible(
            piece,
            self.work,
            refs["words"],
            listed.mask,
            length=listed.length if item.has_limits else self.work.seq_k,
            segments=segments,
        )

    def add_product(self, acc: Any, x: jax.Array, y: Any) -> None:
        """Add a matmul of registers and shared memory to a sum."""
        x = x.astype(self.build.dtype)
        if self.build.interprets:  # It has no matmuls of registers.
            staged = self.mine("staged")
            staged[...] = x
            plgpu.commit_smem()
            plgpu.wgmma(acc, staged, y)
            plgpu.wgmma_wait(0)
        else:
            plgpu.wgmma(acc, x, y)

    def write(self, results: dict[str, tuple[jax.Array, str]], tokens: Any) -> None:
        """Write sums through shared memory that is free again."""
        item, refs = self.item, self.refs

        @pl.when(item.is_whole)
        def _() -> None:
            for sums, by_way_of in results.values():
                self.mine(by_way_of)[...] = sums.astype(self.build.dtype)
            plgpu.commit_smem()
            for name, (_, by_way_of) in results.items():
                there = refs[name].at[item.row, tokens, item.head]
                plgpu.copy_smem_to_gmem(self.mine(by_way_of), there)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(item.part >= 0)
        def _() -> None:
            rows = pl.ds(item.wg * ROWS, ROWS)
            for name, (sums, _) in results.items():
                if f"{name}_parts" in refs:
                    place = (item.row, item.head, item.part, rows)
                    refs[f"{name}_parts"].at[place][...] = sums
