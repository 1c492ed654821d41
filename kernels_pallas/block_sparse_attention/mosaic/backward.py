"""The backward pass: queries by the tile work's rows, keys and values by its columns.

Both recompute the weights from the sums that the forward pass saved. A step computes 64
tokens of the other side of a tile, so that all sums stay in registers.

Source: Dao et al., "FlashAttention" (2022), algorithm 4.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.block_sparse_attention.mosaic.backward_program import (
    DELTA,
    LSE,
    OTHERS,
    Arrays,
    Parts,
    call,
)
from kernels_pallas.block_sparse_attention.mosaic.common import (
    OF_COLUMNS,
    OF_ROWS,
    ROWS,
    WARPGROUPS,
    Build,
    accumulator,
)
from kernels_pallas.block_sparse_attention.mosaic.masks import Piece


def of_queries(build: Build, given: Arrays) -> list[jax.Array]:
    """Compute the cotangent of queries, in full tiles.

    Args:
      build: for these operands, and the tile work's rows.
      given: the inputs of the forward pass; do [B, T, N, H]; and of_rows [B, N, 2, T],
        lse to base 2 and delta.

    Returns:
      dq [B, T, N, H], and if rows are split partial sums [B, N, P, tile, H].
    """
    own = {"q": build.dtype, "do": build.dtype, "of_rows": jnp.float32}
    own |= {"segments_q": jnp.int32}
    shared = {"k": build.dtype, "v": build.dtype, "segments_k": jnp.int32}
    return call(
        build,
        given,
        own,
        shared,
        {"dq": "q"},
        build.work.tile.q,
        lambda parts: _OfQueries(parts).run(),
    )


def of_keys(build: Build, given: Arrays) -> list[jax.Array]:
    """Compute the cotangents of keys and values, in full tiles.

    Args:
      build: for these operands, and the tile work's columns.
      given: as for `of_queries`.

    Returns:
      dk and dv of every query head [B, S, N, H]; if columns are split also partial sums
      of both [B, N, P, tile, H].
    """
    own = {"k": build.dtype, "v": build.dtype, "segments_k": jnp.int32}
    shared = {"q": build.dtype, "of_rows": jnp.float32, "do": build.dtype}
    shared |= {"segments_q": jnp.int32}
    return call(
        build,
        given,
        own,
        shared,
        {"dk": "k", "dv": "v"},
        build.work.tile.k,
        lambda parts: _OfKeys(parts).run(),
    )


class _OfQueries:
    """A program that computes dq of a tile of queries."""

    def __init__(self, parts: Parts):
        self.parts, self.item, self.ring = parts, parts.item, parts.ring
        self.build, self.work = parts.build, parts.work

    @property
    def first_q(self) -> Any:
        """The first of this warpgroup's queries."""
        return self.item.place * self.work.tile.q + self.item.wg * ROWS

    def run(self) -> None:
        """Run this warpgroup's role."""
        pl.when(self.item.wg < WARPGROUPS)(self._compute)
        pl.when(self.item.wg == WARPGROUPS)(self._fetch)

    def _steps(self, tiles: Any) -> Any:
        return tiles * (self.work.tile.k // OTHERS)

    def _fetch(self) -> None:
        plgpu.set_max_registers(24, action="decrease")

        def sources(step: Any) -> dict[str, Any]:
            _, first = self.parts.first_other(step, self.work.tile.k)
            return self.parts.places(pl.ds(first, OTHERS))

        self.ring.fetch(self._steps(self.item.count), sources)

    def _compute(self) -> None:
        plgpu.set_max_registers(240, action="increase")
        self.parts.fetch_own(pl.ds(self.first_q, ROWS))
        numbers = self.parts.mine("of_rows")
        of_row = [plgpu.load(numbers.at[i], layout=OF_ROWS) for i in (LSE, DELTA)]

        def run(acc: Any) -> jax.Array:
            full, count = self._steps(self.item.full), self._steps(self.item.count)
            step = functools.partial(self._step, acc=acc, of_row=of_row)
            pl.loop(0, full)(functools.partial(step, masked=False))
            pl.loop(full, count)(functools.partial(step, masked=True))
            return acc[...] * (self.build.scale * math.log(2))

        shape = (ROWS, self.build.size)
        dq = pl.run_scoped(run, accumulator(*shape))
        self.parts.write({"dq": (dq, "q")}, pl.ds(self.first_q, ROWS))

    def _step(
        self, step: Any, *, acc: Any, of_row: list[jax.Array], masked: bool
    ) -> None:
        ring, parts = self.ring, self.parts
        ring.wait("k", step)
        ring.wait("v", step)

        def multiply(scores: Any, dp: Any) -> tuple[jax.Array, jax.Array]:
            plgpu.wgmma(scores, parts.mine("q"), ring.at("k", step).T)
            plgpu.wgmma(dp, parts.mine("do"), ring.at("v", step).T)
            plgpu.wgmma_wait(0)
            ring.free("v", step)
            return scores[...], dp[...]

        shape = (ROWS, OTHERS)
        square = accumulator(*shape)
        scores, dp = pl.run_scoped(multiply, square, square)
        p = jnp.exp2(
            scores * self.build.scale - lax.broadcast_in_dim(of_row[LSE], shape, [0])
        )
        if masked:
            p = jnp.where(self._visible(step), p, 0.0)
        ds = p * (dp - lax.broadcast_in_dim(of_row[DELTA], shape, [0]))
        parts.add_product(acc, ds, ring.at("k", step))
        plgpu.wgmma_wait(0)
        ring.free("k", step)

    def _visible(self, step: Any) -> jax.Array:
        parts, segments = self.parts, None
        if "segments_q" in parts.own:
            self.ring.wait("segments_k", step)
            segments = (
                plgpu.load(parts.mine("segments_q"), layout=OF_ROWS),
                plgpu.load(self.ring.at("segments_k", step), layout=OF_COLUMNS),
            )
            # Read by threads, and written next by the copy engine.
            plgpu.commit_smem()
            self.ring.free("segments_k", step)
        tile = self.work.tile.k
        in_tile, first_k = parts.first_other(step, tile)
        own = self.item.wg * ROWS
        piece = Piece((ROWS, OTHERS), 0, self.first_q, first_k, own, in_tile)
        return parts.shown(piece, step, tile, segments)


class _OfKeys:
    """A program that computes dk and dv of a tile of keys, from transposed scores."""

    def __init__(self, parts: Parts):
        self.parts, self.item, self.ring = parts, parts.item, parts.ring
        self.build, self.work = parts.build, parts.work

    @property
    def first_k(self) -> Any:
        """The first of this warpgroup's keys."""
        return self.item.place * self.work.tile.k + self.item.wg * ROWS

    def run(self) -> None:
        """Run this warpgroup's role."""
        pl.when(self.item.wg < WARPGROUPS)(self._compute)
        pl.when(self.item.wg == WARPGROUPS)(self._fetch)

    def _steps(self, tiles: Any) -> Any:
        return tiles * (self.work.tile.q // OTHERS)

    def _fetch(self) -> None:
        plgpu.set_max_registers(24, action="decrease")

        def sources(step: Any) -> dict[str, Any]:
            _, first = self.parts.first_other(step, self.work.tile.q)
            return self.parts.places(pl.ds(first, OTHERS))

        self.ring.fetch(self._steps(self.item.count), sources)

    def _compute(self) -> None:
        plgpu.set_max_registers(240, action="increase")
        self.parts.fetch_own(pl.ds(self.first_k, ROWS))

        def run(of_k: Any, of_v: Any) -> tuple[jax.Array, jax.Array]:
            full, count = self._steps(self.item.full), self._steps(self.item.count)
            step = functools.partial(self._step, of_k=of_k, of_v=of_v)
            pl.loop(0, full)(functools.partial(step, masked=False))
            pl.loop(full, count)(functools.partial(step, masked=True))
            return of_k[...] * (self.build.scale * math.log(2)), of_v[...]

        sums = accumulator(ROWS, self.build.size)
        dk, dv = pl.run_scoped(run, sums, sums)
        results = {"dk": (dk, "k"), "dv": (dv, "v")}
        self.parts.write(results, pl.ds(self.first_k, ROWS))

    def _step(self, step: Any, *, of_k: Any, of_v: Any, masked: bool) -> None:
        ring, parts, shape = self.ring, self.parts, (ROWS, OTHERS)
        square = accumulator(*shape)
        ring.wait("q", step)

        def score(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, parts.mine("k"), ring.at("q", step).T)
            return acc[...]

        scores = pl.run_scoped(score, square)
        ring.wait("of_rows", step)
        numbers = ring.at("of_rows", step)
        lse = plgpu.load(numbers.at[LSE], layout=OF_COLUMNS)
        p = jnp.exp2(scores * self.build.scale - lax.broadcast_in_dim(lse, shape, [1]))
        if masked:
            p = jnp.where(self._visible(step), p, 0.0)
        ring.wait("do", step)
        # Masks of several blocks leave no registers for two matmuls at a time.
        is_tight = self.work.masks.shape[0] > 1
        if is_tight:
            parts.add_product(of_v, p, ring.at("do", step))
            plgpu.wgmma_wait(0)

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, parts.mine("v"), ring.at("do", step).T)
            if not is_tight:
                parts.add_product(of_v, p, ring.at("do", step))
            plgpu.wgmma_wait(0)
            return acc[...]

        dp = pl.run_scoped(multiply, square)
        ring.free("do", step)
        delta = plgpu.load(numbers.at[DELTA], layout=OF_COLUMNS)
        # Read by threads, and written next by the copy engine.
        plgpu.commit_smem()
        ring.free("of_rows", step)
        ds = p * (dp - lax.broadcast_in_dim(delta, shape, [1]))
        parts.add_product(of_k, ds, ring.at("q", step))
        plgpu.wgmma_wait(0)
        ring.free("q", step)

    def _visible(self, step: Any) -> jax.Array:
        parts, segments = self.parts, None
        if "segments_k" in parts.own:
            self.ring.wait("segments_q", step)
            segments = (
                plgpu.load(self.ring.at("segments_q", step), layout=OF_COLUMNS),
                plgpu.load(parts.mine("segments_k"), layout=OF_ROWS),
            )
            plgpu.commit_smem()
            self.ring.free("segments_q", step)
        tile = self.work.tile.q
        in_tile, first_q = parts.first_other(step, tile)
        own = self.item.wg * ROWS
        piece = Piece((ROWS, OTHERS), 1, first_q, self.first_k, in_tile, own)
        return parts.shown(piece, step, tile, segments)
