"""Block-sparse attention with the kernels: the functions documented in `reference`."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_sparse_attention.lists import Lists
from kernels_pallas.block_sparse_attention.mosaic import backward as backward_pass
from kernels_pallas.block_sparse_attention.mosaic import forward as forward_pass
from kernels_pallas.block_sparse_attention.mosaic import parts
from kernels_pallas.block_sparse_attention.mosaic.common import Build
from kernels_pallas.block_sparse_attention.mosaic.device_lists import (
    device_lists,
    group_columns,
)
from kernels_pallas.block_sparse_attention.mosaic.query_sums import sum_columns
from kernels_pallas.block_sparse_attention.operands import Limits
from kernels_pallas.block_sparse_attention.tile_work import TileWork

LN2 = math.log(2)


@dataclasses.dataclass(frozen=True)
class Options:
    """How the kernels are run.

    Attributes:
      deterministic: whether cotangents are the same to the bit in every run; otherwise
        they are computed in one pass where there is one.
      interpret: how to run without a GPU; None for a GPU.
    """

    deterministic: bool = True
    interpret: Any = None


DEFAULT = Options()


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    scale: float,
    options: Options = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """Attend, as `reference.forward` does."""
    build = _build(q_BTNH, k_BSKH, limits, work, scale, options.interpret)
    given = _given(work, limits, q_BTNH, k_BSKH, v_BSKH)
    o, lse2, *partial = forward_pass.forward(build, given)
    if partial:
        of_parts = partial[0], partial[1]
        o, lse2 = parts.join_attention(
            (o, lse2), of_parts, work.rows, limits.first_head
        )
    return o[:, : work.seq_q], LN2 * lse2[:, :, : work.seq_q]


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    scale: float,
    lse_BNT: jax.Array,
    delta_BNT: jax.Array,
    do_BTNH: jax.Array,
    options: Options = DEFAULT,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the cotangents, as `reference.backward` does."""
    given = _given(work, limits, q_BTNH, k_BSKH, v_BSKH)
    of_rows = jnp.stack([lse_BNT / LN2, delta_BNT], axis=2)
    padding = [(0, 0)] * 3 + [(0, -work.seq_q % work.tile.q)]
    given["do"] = _padded(do_BTNH, work.tile.q)
    given["of_rows"] = jnp.pad(of_rows, padding)
    build = _build(q_BTNH, k_BSKH, limits, work, scale, options.interpret, stages=3)
    if build.is_large:
        build = dataclasses.replace(build, stages=1)
    by_keys, columns = _by_keys(build, limits)
    if options.deterministic or build.is_large:
        found = backward_pass.of_queries(build, given)
        (of_q,) = _joined(found, work.rows, limits.first_head)
        found = backward_pass.of_keys(by_keys, given)
    else:
        *found, of_q = backward_pass.of_all(by_keys, given)
        if by_keys.interprets:
            of_q = sum_columns(of_q, _active(work, limits, build.heads))
        of_q = of_q.astype(q_BTNH.dtype)
    of_k, of_v = _joined(found, columns, _first_group(by_keys, limits))
    return of_q[:, : work.seq_q], of_k[:, : work.seq_k], of_v[:, : work.seq_k]


backward_unordered = functools.partial(backward, options=Options(deterministic=False))
"""`backward`, with dq summed in no fixed order where that is faster."""


def _build(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    scale: float,
    interpret: Any,
    stages: int = 2,
) -> Build:
    batch, _, heads, size = q_BTNH.shape
    return Build(
        work=work,
        lists=device_lists(
            work.rows,
            work,
            heads,
            limits.first_head,
            has_limits=_has_limits(limits),
        ),
        batch=batch,
        heads=heads,
        group=heads // k_BSKH.shape[2],
        by_keys=False,
        size=size,
        dtype=q_BTNH.dtype,
        scale=scale / LN2,
        stages=stages,
        interpret=interpret,
    )


def _by_keys(build: Build, limits: Limits) -> tuple[Build, Lists]:
    """The build of the same operands for programs of keys, and their lists."""
    build = dataclasses.replace(build, by_keys=True)
    programs = build.grid_heads * build.batch
    columns = group_columns(build.work, build.group, programs)
    lists = device_lists(
        columns,
        build.work,
        build.grid_heads,
        _first_group(build, limits),
        has_limits=_has_limits(limits),
    )
    return dataclasses.replace(build, lists=lists), columns


def _first_group(build: Build, limits: Limits) -> Any:
    """The first present group of heads; None if all are present."""
    first = limits.first_head
    return None if first is None else first // build.group


def _has_limits(limits: Limits) -> bool:
    return limits.kv_seq_lens is not None or limits.segments_q is not None


def _active(work: TileWork, limits: Limits, heads: int) -> jax.Array:
    """Which tiles are active: [N, tiles of queries, tiles of keys], or of one head."""
    rows = work.rows
    active = np.zeros((len(rows.row), work.tiles_q + 1, work.tiles_k), bool)
    head = np.arange(len(active))[:, None]
    active[head, rows.tile_row, rows.column] = True
    found = jnp.asarray(active[:, :-1])
    if len(active) == 1 or limits.first_head is None:
        return found
    return jax.lax.dynamic_slice_in_dim(found, limits.first_head, heads)


def _given(
    work: TileWork, limits: Limits, q: jax.Array, k: jax.Array, v: jax.Array
) -> dict[str, jax.Array]:
    """The operands that exist, by name, padded to full tiles."""
    of_q, of_k = work.tile.q, work.tile.k
    given = {"q": _padded(q, of_q), "k": _padded(k, of_k), "v": _padded(v, of_k)}
    if limits.kv_seq_lens is not None:
        given["lens"] = limits.kv_seq_lens
    if limits.segments_q is not None and limits.segments_k is not None:
        given["segments_q"] = _padded(limits.segments_q, of_q)
        given["segments_k"] = _padded(limits.segments_k, of_k)
    return given


def _joined(
    found: list[jax.Array], lists: Lists, first_head: jax.Array | None
) -> list[jax.Array]:
    """Add partial results to the full ones."""
    if not lists.num_parts:
        return found
    half = len(found) // 2
    return [
        parts.join_sums(whole, of_parts, lists, first_head)
        for whole, of_parts in zip(found[:half], found[half:], strict=True)
    ]


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Pad the tokens of [B, T, ...] to full tiles."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % size)
    return jnp.pad(x, padding) if padding[1][1] else x
