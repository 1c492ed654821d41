"""The forward pass: a flash attention over each item's list of tiles of keys.

Two warpgroups compute 64 queries each of a tile of 128 and share its keys and values,
which a third fetches. While one runs its matmuls, the other runs its softmax.

Source: Shah et al., "FlashAttention-3" (2024).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.block_sparse_attention.mosaic.common import (
    LAYOUT,
    LISTED,
    OF_COLUMNS,
    OF_ROWS,
    ROWS,
    WARPGROUPS,
    Build,
    Item,
    Listed,
    Ring,
    accumulator,
    splat,
    tiled_smem,
)
from kernels_pallas.block_sparse_attention.mosaic.masks import Piece, visible

_NEVER = -1e30
"""A masked score; its weight is set to 0, because it may be the maximum of its row."""

State = tuple[jax.Array, jax.Array, jax.Array]
"""Of each row: weighted sums of values, the maximum to base 2, and the sum."""


def forward(build: Build, given: dict[str, jax.Array]) -> list[jax.Array]:
    """Attend over full tiles.

    Args:
      build: for these operands, and the tile work's rows.
      given: q [B, T, N, H], k and v [B, S, K, H], T and S multiples of the tile's; and
        with limits lens [B], segments_q [B, T] and segments_k [B, S].

    Returns:
      Results [B, T, N, H] and the logarithms to base 2 of the sums [B, N, T]; if rows
      are split, also partial results [B, N, P, tile, H] and their logarithms
      [B, N, P, tile].
    """
    work, num_parts = build.work, build.lists.num_parts
    keys = keys_of_step(build)
    batch, seq_q, heads, size = given["q"].shape
    fp32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outs = {
        "o": jax.ShapeDtypeStruct(given["q"].shape, build.dtype),
        "lse": fp32((batch, heads, seq_q)),
    }
    if num_parts:
        of_parts = (batch, heads, num_parts, work.tile.q)
        outs |= {"o_parts": fp32((*of_parts, size)), "lse_parts": fp32(of_parts)}
    own = tuple(name for name in ("q", "segments_q") if name in given)
    shared = tuple(name for name in ("k", "segments_k", "v") if name in given)
    memory = {
        "q": tiled_smem(WARPGROUPS, ROWS, size, dtype=build.dtype),
        "k": tiled_smem(build.stages, keys, size, dtype=build.dtype),
        "v": tiled_smem(build.stages, keys, size, dtype=build.dtype),
        "lse": plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
        "segments_q": plgpu.SMEM((WARPGROUPS, ROWS), jnp.int32),
        "segments_k": plgpu.SMEM((build.stages, keys), jnp.int32),
        "p": plgpu.SMEM((WARPGROUPS, ROWS, keys), build.dtype),
    }
    memory["wg"] = plgpu.SMEM((WARPGROUPS,), jnp.int32)
    used = {*own, *shared, "lse", *(("p",) if build.interprets else ())}
    used |= {"wg"} if build.is_large else set()
    memory = {name: ref for name, ref in memory.items() if name in used}
    memory |= Ring.listed_memory(build.stages)
    barriers = {
        **{name: plgpu.Barrier(num_barriers=WARPGROUPS) for name in own},
        **Ring.barriers(shared, "v", build.stages),
        "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }

    def program(refs: dict, memory: dict, barriers: dict) -> None:
        ring = Ring(shared, "v", memory, barriers, build.stages)
        _Program(build, refs, memory, barriers, own, ring).run()

    return build.call("forward", 2, given, outs, memory, barriers, program)


def keys_of_step(build: Build) -> int:
    """Keys of a step: fewer where the sums of larger heads leave less room."""
    return 64 if build.is_large else build.work.tile.k


class _Program:
    """One program of the grid."""

    def __init__(
        self,
        build: Build,
        refs: dict[str, Any],
        memory: dict[str, Any],
        barriers: dict[str, Any],
        own: tuple[str, ...],
        ring: Ring,
    ):
        self.build, self.work = build, build.work
        self.refs, self.memory, self.barriers = refs, memory, barriers
        self.own, self.ring = own, ring
        self.keys = keys_of_step(build)
        self.per_tile = build.work.tile.k // self.keys
        self.item = Item.read(refs, build)
        self.first_q = self._first_query(self.item.wg)
        self.queries = pl.ds(self.first_q, ROWS)

    def _first_query(self, wg: Any) -> Any:
        return self.item.place * self.work.tile.q + wg * ROWS

    @property
    def wg(self) -> Any:
        """This warpgroup; read back where the loop needs the registers of addresses."""
        wg = self.item.wg
        return self.memory["wg"][wg] if "wg" in self.memory else wg

    def run(self) -> None:
        """Run this warpgroup's role."""
        pl.when(self.item.wg < WARPGROUPS)(self._compute)
        pl.when(self.item.wg == WARPGROUPS)(self._fetch)

    def _fetch(self) -> None:
        plgpu.set_max_registers(24, action="decrease")
        item, tile = self.item, self.work.tile.k

        def sources(step: Any) -> dict[str, Any]:
            number, in_tile = step, jnp.int32(0)
            if self.per_tile > 1:
                number = lax.div(step, jnp.int32(self.per_tile))
                in_tile = lax.rem(step, jnp.int32(self.per_tile)) * self.keys
            other, _, mask = item.other(number)
            first = other * tile + in_tile
            keys = pl.ds(first, self.keys)
            listed = Listed(first, in_tile, item.head, mask, item.length)
            found: dict[str, Any] = {LISTED: listed}
            found["k"] = self.refs["k"].at[item.row, keys, item.kv_head]
            if "segments_k" in self.refs:
                found["segments_k"] = self.refs["segments_k"].at[item.row, keys]
            return found | {"v": self.refs["v"].at[item.row, keys, item.kv_head]}

        self.ring.fetch(self.num_steps, sources)

    @property
    def num_steps(self) -> Any:
        """Steps of the item."""
        return self.item.count * self.per_tile

    def _take_turn(self) -> None:
        """Give the other warpgroup the tensor cores."""
        plgpu.barrier_arrive(self.barriers["turn"])
        plgpu.barrier_wait(self.barriers["turn"])

    def _compute(self) -> None:
        plgpu.set_max_registers(240, action="increase")
        self._fetch_own()
        item = self.item
        state = (
            splat(0.0, (ROWS, self.build.size), LAYOUT),
            splat(_NEVER, (ROWS,), OF_ROWS),
            splat(0.0, (ROWS,), OF_ROWS),
        )
        pl.when(item.count > 0)(lambda: self.ring.wait("k", jnp.int32(0)))
        pl.when(item.wg == 1)(self._take_turn)
        carry, full = (state, jnp.int32(0)), 0
        if not item.has_limits:
            full = item.full * self.per_tile
            unmasked = functools.partial(self._step, masked=False)
            carry = lax.fori_loop(0, full, unmasked, carry)
        masked = functools.partial(self._step, masked=True)
        state, _ = lax.fori_loop(full, self.num_steps, masked, carry)
        pl.when(item.wg == 0)(self._take_turn)
        self._write(*state)

    def _fetch_own(self) -> None:
        wg, row = self.item.wg, self.item.row
        if "wg" in self.memory:
            self.memory["wg"][wg] = wg
        sources = {"q": self.refs["q"].at[row, self.queries, self.item.head]}
        if "segments_q" in self.own:
            sources["segments_q"] = self.refs["segments_q"].at[row, self.queries]
        for name, source in sources.items():
            loaded = self.barriers[name].at[wg]
            plgpu.copy_gmem_to_smem(source, self.memory[name].at[wg], loaded)
        for name in sources:
            plgpu.barrier_wait(self.barriers[name].at[wg])

    def _step(
        self, step: Any, carry: tuple[State, Any], *, masked: bool
    ) -> tuple[State, Any]:
        """Process a tile of keys, in a buffer of the ring."""
        (sums, top, total), slot = carry
        queries, keys = self.memory["q"].at[self.wg], self.ring.at("k", slot)

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, queries, keys.T)
            self._take_turn()
            return acc[...]

        shape = (ROWS, self.keys)
        scores = pl.run_scoped(multiply, accumulator(*shape))
        self.ring.free("k", slot)
        shown = self._visible(slot) if masked else None
        if shown is not None:
            scores = jnp.where(shown, scores, _NEVER)
        scale = self.build.scale
        new_top = jnp.maximum(top, scores.max(axis=1) * scale)
        kept = jnp.exp2(top - new_top)
        p = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_top, shape, [0]))
        if shown is not None:
            p = jnp.where(shown, p, 0.0)
        sums *= lax.broadcast_in_dim(kept, sums.shape, [0])
        total = total * kept + p.sum(axis=1)
        half = p.astype(self.build.dtype)
        if not self.build.interprets:
            # The softmax ends here: no part of it may move past the turn.
            sums, new_top, total, half = lax.optimization_barrier(
                (sums, new_top, total, half)
            )
        plgpu.barrier_arrive(self.barriers["turn"])
        if not masked:
            self.ring.wait("v", slot)
        plgpu.barrier_wait(self.barriers["turn"])
        following = self.ring.next(slot)
        sums = self._add_values(slot, following, step, sums, half)
        self.ring.free("v", slot)
        return (sums, new_top, total), following

    def _visible(self, slot: Any) -> jax.Array:
        item, work, refs, wg = self.item, self.work, self.refs, self.wg
        self.ring.wait("v", slot)
        listed = self.ring.listed(slot)
        segments = None
        if "segments_q" in self.own:
            self.ring.wait("segments_k", slot)
            segments = (
                plgpu.load(self.memory["segments_q"].at[wg], layout=OF_ROWS),
                plgpu.load(self.ring.at("segments_k", slot), layout=OF_COLUMNS),
            )
            # Read by threads, and written next by the copy engine.
            plgpu.commit_smem()
            self.ring.free("segments_k", slot)
        piece = Piece(
            shape=(ROWS, self.keys),
            q_dim=0,
            first_q=self._first_query(wg) if self.build.is_large else self.first_q,
            first_k=listed.first,
            q_in_tile=wg * ROWS,
            k_in_tile=listed.in_tile if self.per_tile > 1 else jnp.int32(0),
        )
        length = listed.length if item.has_limits else work.seq_k
        return visible(
            piece, work, refs["words"], listed.mask, length=length, segments=segments
        )

    def _add_values(
        self, slot: Any, following: Any, step: Any, sums: jax.Array, p: jax.Array
    ) -> jax.Array:
        values = self.ring.at("v", slot)

        def wait_for_next_keys() -> None:
            is_more = step + 1 < self.num_steps
            pl.when(is_more)(lambda: self.ring.wait("k", following))

        if self.build.interprets:  # It has no matmuls of registers.
            staged = self.memory["p"].at[self.item.wg]

            def multiply_staged(acc: Any) -> jax.Array:
                staged[...] = p
                plgpu.commit_smem()
                plgpu.wgmma(acc, staged, values)
                return acc[...]

            acc = accumulator(ROWS, self.build.size)
            sums = sums + pl.run_scoped(multiply_staged, acc)
            wait_for_next_keys()
            return sums

        def multiply(acc: Any) -> None:
            plgpu.wgmma(acc, p, values)
            wait_for_next_keys()

        started: Any = plgpu.ACC.init(sums)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_state(multiply)(started)

    def _write(self, sums: jax.Array, top: jax.Array, total: jax.Array) -> None:
        at_least = jnp.maximum(total, 1e-30)
        sums *= lax.broadcast_in_dim(1.0 / at_least, sums.shape, [0])
        lse = top + jnp.log(at_least) * math.log2(math.e)
        lse = jnp.where(total > 0.0, lse, -jnp.inf)
        item, refs = self.item, self.refs
        o, here = self.memory["q"].at[item.wg], self.memory["lse"].at[item.wg]

        @pl.when(item.is_whole)
        def _() -> None:
            o[...] = sums.astype(self.build.dtype)
            here[...] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o, refs["o"].at[item.row, self.queries, item.head])
            place = (item.row, item.head, self.queries)
            plgpu.copy_smem_to_gmem(here, refs["lse"].at[place])
            plgpu.wait_smem_to_gmem(0)

        if "o_parts" not in refs:
            return

        @pl.when(item.part >= 0)
        def _() -> None:
            here[...] = lse
            plgpu.commit_smem()
            place = (item.row, item.head, item.part, pl.ds(item.wg * ROWS, ROWS))
            refs["o_parts"].at[place][...] = sums
            plgpu.copy_smem_to_gmem(here, refs["lse_parts"].at[place])
            plgpu.wait_smem_to_gmem(0)
