"""Block-sparse attention with the kernels: the functions documented in `reference`."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.block_sparse_attention.lists import Lists
from kernels_pallas.block_sparse_attention.mosaic import backward as backward_pass
from kernels_pallas.block_sparse_attention.mosaic import forward as forward_pass
from kernels_pallas.block_sparse_attention.mosaic import parts
from kernels_pallas.block_sparse_attention.mosaic.common import Build
from kernels_pallas.block_sparse_attention.mosaic.device_lists import device_lists
from kernels_pallas.block_sparse_attention.operands import Limits
from kernels_pallas.block_sparse_attention.tile_work import TileWork

LN2 = math.log(2)


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    scale: float,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend, as `reference.forward` does."""
    build = _build(q_BTNH, k_BSKH, limits, work, work.rows, scale, 2, interpret)
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
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the cotangents, as `reference.backward` does."""
    given = _given(work, limits, q_BTNH, k_BSKH, v_BSKH)
    of_rows = jnp.stack([lse_BNT / LN2, delta_BNT], axis=2)
    padding = [(0, 0)] * 3 + [(0, -work.seq_q % work.tile.q)]
    given["do"] = _padded(do_BTNH, work.tile.q)
    given["of_rows"] = jnp.pad(of_rows, padding)
    build = _build(q_BTNH, k_BSKH, limits, work, work.rows, scale, 3, interpret)
    (of_q,) = _joined(backward_pass.of_queries(build, given), work.rows, limits)
    build = _build(q_BTNH, k_BSKH, limits, work, work.columns, scale, 3, interpret)
    of_k, of_v = _joined(backward_pass.of_keys(build, given), work.columns, limits)
    batch, _, kv_heads, size = k_BSKH.shape
    shape = (batch, -1, kv_heads, q_BTNH.shape[2] // kv_heads, size)
    of_k, of_v = (
        x.reshape(shape).sum(3, dtype=jnp.float32).astype(k_BSKH.dtype)
        for x in (of_k, of_v)
    )
    return of_q[:, : work.seq_q], of_k[:, : work.seq_k], of_v[:, : work.seq_k]


def _build(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    lists: Lists,
    scale: float,
    stages: int,
    interpret: Any,
) -> Build:
    batch, _, heads, size = q_BTNH.shape
    has_limits = limits.kv_seq_lens is not None or limits.segments_q is not None
    return Build(
        work=work,
        lists=device_lists(
            lists, work, heads, limits.first_head, has_limits=has_limits
        ),
        batch=batch,
        heads=heads,
        group=heads // k_BSKH.shape[2],
        size=size,
        dtype=q_BTNH.dtype,
        scale=scale / LN2,
        stages=stages,
        interpret=interpret,
    )


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


def _joined(found: list[jax.Array], lists: Lists, limits: Limits) -> list[jax.Array]:
    """Add partial results to the full ones."""
    if not lists.num_parts:
        return found
    half = len(found) // 2
    return [
        parts.join_sums(whole, of_parts, lists, limits.first_head)
        for whole, of_parts in zip(found[:half], found[half:], strict=True)
    ]


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Pad the tokens of [B, T, ...] to full tiles."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (0, -x.shape[1] % size)
    return jnp.pad(x, padding) if padding[1][1] else x
