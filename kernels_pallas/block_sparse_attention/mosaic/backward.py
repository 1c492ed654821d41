"""The backward pass: queries by the tile work's rows, keys and values by its columns.

All recompute the weights from the sums that the forward pass saved. A step computes 64
tokens of the other side of a tile, so that all sums stay in registers. For heads of 256
these have room for one result only: keys and values have a pass each.

Source: Dao et al., "FlashAttention" (2022), algorithm 4.
"""

import dataclasses
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
    Pass,
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
from kernels_pallas.block_sparse_attention.mosaic.query_sums import QuerySums


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
    what = Pass(
        own,
        shared,
        {"dq": "q"},
        build.work.tile.q,
        products=3,
        held=_held(build, given),
        memory=_wg_memory() if build.is_large else {},
    )
    return call(build, given, what, lambda parts: _OfQueries(parts).run())


def of_keys(build: Build, given: Arrays) -> list[jax.Array]:
    """Compute the cotangents of keys and values, in full tiles.

    Args:
      build: for these operands, and the columns of groups of heads.
      given: as for `of_queries`.

    Returns:
      dk and dv [B, S, K, H]; if columns are split also partial sums of both
      [B, K, P, tile, H].
    """
    if build.is_large:
        return _of_keys_apart(build, given)
    what = _pass_of_keys(build, given, {"dk": "k", "dv": "v"}, products=4)
    return call(build, given, what, lambda parts: _OfKeys(parts, what, None).run())


def _of_keys_apart(build: Build, given: Arrays) -> list[jax.Array]:
    """Compute dk in a pass of three matmuls, and dv in one of two.

    There are registers for the sums of one of them.
    """
    of_dk = _pass_of_keys(build, given, {"dk": "k"}, products=3)
    dk = call(build, given, of_dk, lambda parts: _OfKeys(parts, of_dk, None).run())
    # Without values there is memory for a second buffer.
    build = dataclasses.replace(build, stages=2)
    of_dv = _pass_of_keys(build, given, {"dv": "k"}, products=2)
    dv = call(build, given, of_dv, lambda parts: _OfKeys(parts, of_dv, None).run())
    return [x for pair in zip(dk, dv, strict=True) for x in pair]


def of_all(build: Build, given: Arrays) -> list[jax.Array]:
    """Compute all cotangents in one pass, in full tiles.

    Args:
      build: as for `of_keys`.
      given: as for `of_queries`.

    Returns:
      What `of_keys` returns, and dq [B, T, N, H] in fp32, summed in no fixed order.
    """
    what = _pass_of_keys(build, given, {"dk": "k", "dv": "v"}, products=5)
    what.memory.update(QuerySums.memory(build))
    what.barriers.update(QuerySums.barriers())

    def run(parts: Parts) -> None:
        _OfKeys(parts, what, QuerySums(parts)).run()

    shape = given["q"].shape
    if build.interprets:
        shape = (build.work.tiles_k, *shape)
        what.outs["dq"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return call(build, given, what, run)
    dq: Any = jax.new_ref(jnp.zeros(shape, jnp.float32))
    return [*call(build, given | {"dq": dq}, what, run), dq[...]]


def _pass_of_keys(
    build: Build, given: Arrays, results: dict[str, str], products: int
) -> Pass:
    own = {"k": build.dtype, "v": build.dtype, "segments_k": jnp.int32}
    if "dk" not in results:
        del own["v"]
    shared = {"q": build.dtype, "of_rows": jnp.float32, "do": build.dtype}
    shared |= {"segments_q": jnp.int32}
    held: tuple[str, ...] = ()
    if products == 5 and build.size == 64:
        # In shared memory the tiles of keys of 64 are narrower than the queries', and a
        # matmul reads equal ones.
        held = ("k", "v")
    elif products == 4:
        keeps = build.size == 64 and not _has_limits(given)
        held = ("k", "v") if keeps else ("v",)
    is_tight = build.size > 64 or products == 5
    memory = _wg_memory() if is_tight else {}
    return Pass(own, shared, results, build.work.tile.k, products, held, memory)


def _wg_memory() -> dict[str, Any]:
    return {"wg": plgpu.SMEM((WARPGROUPS,), jnp.int32)}


def _has_limits(given: Arrays) -> bool:
    """Whether lengths or segments limit what is seen.

    Where they do, CUDA 13.0's assembler gives the registers of held heads of 64 to the
    weights, and never restores them: keys if there are any limits, queries and do if
    there are segments. Their matmuls read shared memory
    (tests/compiled/test_kernels.py).
    """
    return "lens" in given or "segments_q" in given


def _held(build: Build, given: Arrays) -> tuple[str, ...]:
    """What of the pass of queries fits the registers: less beside a mask's numbers."""
    if build.is_large or (build.size == 64 and "segments_q" in given):
        return ()
    has_mask = build.work.masks.shape[0] > 1 or _has_limits(given)
    return ("do",) if build.size == 128 and has_mask else ("q", "do")


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

    def _fetch(self) -> None:
        plgpu.set_max_registers(24, action="decrease")
        tile = self.work.tile.k
        sources = functools.partial(self.parts.sources, tile=tile)
        self.ring.fetch(self.item.count * (tile // OTHERS), sources)

    def _compute(self) -> None:
        plgpu.set_max_registers(240, action="increase")
        self.parts.fetch_own(pl.ds(self.first_q, ROWS))
        numbers = self.parts.mine("of_rows")
        of_row = [plgpu.load(numbers.at[i], layout=OF_ROWS) for i in (LSE, DELTA)]

        def run(acc: Any) -> jax.Array:
            held = self.parts.load_held()
            step = functools.partial(self._step, acc=acc, of_row=of_row, held=held)
            self.parts.loop(step, self.work.tile.k)
            return acc[...] * (self.build.scale * math.log(2))

        shape = (ROWS, self.build.size)
        dq = pl.run_scoped(run, accumulator(*shape))
        self.parts.write({"dq": (dq, "q")}, pl.ds(self.first_q, ROWS))

    def _step(
        self,
        slot: Any,
        *,
        acc: Any,
        of_row: list[jax.Array],
        held: Arrays,
        masked: bool,
    ) -> None:
        ring, parts = self.ring, self.parts
        ring.wait("k", slot)
        ring.wait("v", slot)

        def multiply(*accs: Any, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
            for acc, name in zip(accs, names, strict=True):
                other = ring.at({"q": "k", "do": "v"}[name], slot).T
                plgpu.wgmma(acc, parts.left(name, held), other)
            plgpu.wgmma_wait(0)
            if "do" in names:
                ring.free("v", slot)
            return tuple(acc[...] for acc in accs)

        def weights(scores: jax.Array) -> jax.Array:
            lse = lax.broadcast_in_dim(of_row[LSE], shape, [0])
            p = jnp.exp2(scores * self.build.scale - lse)
            return jnp.where(self._visible(slot), p, 0.0) if masked else p

        shape = (ROWS, OTHERS)
        square = accumulator(*shape)
        if masked and self.build.is_large:
            # Beside a mask there are no registers for two matmuls at a time.
            (scores,) = pl.run_scoped(functools.partial(multiply, names=("q",)), square)
            p = weights(scores)
            (dp,) = pl.run_scoped(functools.partial(multiply, names=("do",)), square)
        else:
            both = functools.partial(multiply, names=("q", "do"))
            scores, dp = pl.run_scoped(both, square, square)
            p = weights(scores)
        ds = p * (dp - lax.broadcast_in_dim(of_row[DELTA], shape, [0]))
        parts.add_product(acc, ds, ring.at("k", slot))
        plgpu.wgmma_wait(0)
        ring.free("k", slot)

    def _visible(self, slot: Any) -> jax.Array:
        parts, segments = self.parts, None
        if "segments_q" in parts.own:
            self.ring.wait("segments_k", slot)
            segments = (
                plgpu.load(parts.mine("segments_q"), layout=OF_ROWS),
                plgpu.load(self.ring.at("segments_k", slot), layout=OF_COLUMNS),
            )
            # Read by threads, and written next by the copy engine.
            plgpu.commit_smem()
            self.ring.free("segments_k", slot)
        listed = self.ring.listed(slot)
        own = self.item.wg * ROWS
        piece = Piece(
            (ROWS, OTHERS), 0, self.first_q, listed.first, own, listed.in_tile
        )
        return parts.shown(piece, listed, segments)


class _OfKeys:
    """A program that computes dk, dv or both of a tile, from transposed scores.

    Args:
      parts: of the program.
      what: the pass.
      queries: adds to dq in the same pass; None where another pass computes it.
    """

    def __init__(self, parts: Parts, what: Pass, queries: QuerySums | None):
        self.what, self.queries = what, queries
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

    def _fetch(self) -> None:
        plgpu.set_max_registers(24, action="decrease")
        tile = self.work.tile.q
        sources = functools.partial(self.parts.sources, tile=tile)
        self.ring.fetch(self.item.count * (tile // OTHERS), sources)

    def _compute(self) -> None:
        plgpu.set_max_registers(240, action="increase")
        self.parts.fetch_own(pl.ds(self.first_k, ROWS))
        if self.queries is not None:
            self.queries.start()

        by_way_of = self.what.results
        scale = self.build.scale * math.log(2)

        def run(*sums: Any) -> list[jax.Array]:
            held = self.parts.load_held()
            accs = dict(zip(by_way_of, sums, strict=True))
            step = functools.partial(self._step, accs=accs, held=held)
            self.parts.loop(step, self.work.tile.q)
            return [
                acc[...] * scale if name == "dk" else acc[...]
                for name, acc in accs.items()
            ]

        sums = [accumulator(ROWS, self.build.size)] * len(by_way_of)
        found = pl.run_scoped(run, *sums)
        if self.queries is not None:
            self.queries.finish()
        pairs = zip(found, by_way_of.values(), strict=True)
        results = dict(zip(by_way_of, pairs, strict=True))
        self.parts.write(results, pl.ds(self.first_k, ROWS))

    def _step(
        self, slot: Any, *, accs: dict[str, Any], held: Arrays, masked: bool
    ) -> None:
        ring, parts, shape = self.ring, self.parts, (ROWS, OTHERS)
        square = accumulator(*shape)
        ring.wait("q", slot)

        def score(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, parts.left("k", held), ring.at("q", slot).T)
            return acc[...]

        scores = pl.run_scoped(score, square)
        ring.wait("of_rows", slot)
        numbers = ring.at("of_rows", slot)
        lse = plgpu.load(numbers.at[LSE], layout=OF_COLUMNS)
        p = jnp.exp2(scores * self.build.scale - lax.broadcast_in_dim(lse, shape, [1]))
        if masked:
            p = jnp.where(self._visible(slot), p, 0.0)
        ring.wait("do", slot)
        # Masks of several blocks leave no registers for two matmuls at a time, nor do
        # values that are held in some.
        is_tight = self.work.masks.shape[0] > 1 or self.build.size > 64
        if is_tight and "dv" in accs:
            parts.add_product(accs["dv"], p, ring.at("do", slot))
            plgpu.wgmma_wait(0)
        if "dk" not in accs:
            # Read by threads, and written next by the copy engine.
            plgpu.commit_smem()
            for name in ("of_rows", "do", "q"):
                ring.free(name, slot)
            return

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, parts.left("v", held), ring.at("do", slot).T)
            if not is_tight:
                parts.add_product(accs["dv"], p, ring.at("do", slot))
            plgpu.wgmma_wait(0)
            return acc[...]

        dp = pl.run_scoped(multiply, square)
        ring.free("do", slot)
        delta = plgpu.load(numbers.at[DELTA], layout=OF_COLUMNS)
        # Read by threads, and written next by the copy engine.
        plgpu.commit_smem()
        ring.free("of_rows", slot)
        ds = p * (dp - lax.broadcast_in_dim(delta, shape, [1]))
        if self.queries is not None:
            self.queries.put(ds)
        parts.add_product(accs["dk"], ds, ring.at("q", slot))
        if self.queries is not None:
            self.queries.add(slot)
        plgpu.wgmma_wait(0)
        ring.free("q", slot)

    def _visible(self, slot: Any) -> jax.Array:
        parts, segments = self.parts, None
        if "segments_k" in parts.own:
            self.ring.wait("segments_q", slot)
            segments = (
                plgpu.load(self.ring.at("segments_q", slot), layout=OF_COLUMNS),
                plgpu.load(parts.mine("segments_k"), layout=OF_ROWS),
            )
            plgpu.commit_smem()
            self.ring.free("segments_q", slot)
        listed = self.ring.listed(slot)
        own = self.item.wg * ROWS
        piece = Piece(
            (ROWS, OTHERS), 1, listed.first, self.first_k, listed.in_tile, own
        )
        return parts.shown(piece, listed, segments)
