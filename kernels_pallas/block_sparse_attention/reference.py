"""Block-sparse attention in plain JAX: for any device, and the kernels' reference.

Active tiles are gathered, one chunk at a time, and multiplied as one batch; an online
softmax combines those of a row. Work grows with the active tiles, and memory with the
sequence: no array of T x S is made.

Source: Dao et al., "FlashAttention" (2022), for the softmax and the backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_sparse_attention.operands import Limits
from kernels_pallas.block_sparse_attention.tile_work import TileWork

_NEVER = -1e30
"""A minimum for scores that can be subtracted from itself."""


class _Keys(NamedTuple):
    """Arrays of one head: [tiles, B, tokens of a tile, H]."""

    k: jax.Array
    v: jax.Array


class _Chunk(NamedTuple):
    """Some active tiles, E of them: their positions and masks."""

    row: jax.Array | np.ndarray
    column: jax.Array | np.ndarray
    mask: jax.Array | np.ndarray


class _Saved(NamedTuple):
    """What the backward pass needs of each query of one head: [tiles, B, tile]."""

    lse: jax.Array
    delta: jax.Array
    do: jax.Array


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attend.

    Args:
      q_BTNH: queries.
      k_BSKH: keys, of K heads that divide N.
      v_BSKH: values.
      limits: further limits on what a query sees.
      work: the work, for T and S.
      scale: of the scores.

    Returns:
      The result, [B, T, N, H], and the logarithm of each softmax's sum, [B, N, T] in
      fp32: -inf for a query that sees nothing, whose result is 0.
    """
    heads = _Heads(q_BTNH, k_BSKH, v_BSKH, work, limits.first_head)
    head = functools.partial(_forward_head, limits=_tiled_limits(limits, work))
    o, lse = heads.map(functools.partial(head, work=work, scale=scale))
    o_BTNH = heads.untile(o, work.seq_q).astype(q_BTNH.dtype)
    return o_BTNH, heads.untile(lse, work.seq_q).swapaxes(1, 2)


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the cotangents of queries, keys and values.

    Args:
      q_BTNH: queries.
      k_BSKH: keys.
      v_BSKH: values.
      limits: further limits on what a query sees.
      work: the work.
      scale: of the scores.
      lse_BNT: from `forward`.
      delta_BNT: the product of result and cotangent, summed over H, less the
        cotangent of `lse_BNT`.
      do_BTNH: the cotangent of the result.

    Returns:
      dq, dk and dv, in the dtypes of q, k and v.
    """
    heads = _Heads(q_BTNH, k_BSKH, v_BSKH, work, limits.first_head)
    of_rows = [x.swapaxes(1, 2) for x in (lse_BNT, delta_BNT)]
    saved = _Saved(*(heads.tile(x, work.tile.q) for x in (*of_rows, do_BTNH)))
    head = functools.partial(_backward_head, limits=_tiled_limits(limits, work))
    dq, dk, dv = heads.map(functools.partial(head, work=work, scale=scale), saved)
    # Query heads that share a key head are the second dim.
    dk, dv = (x.sum(1, keepdims=True) for x in (dk, dv))
    return (
        heads.untile(dq, work.seq_q).astype(q_BTNH.dtype),
        heads.untile(dk, work.seq_k).astype(k_BSKH.dtype),
        heads.untile(dv, work.seq_k).astype(v_BSKH.dtype),
    )


class _Heads:
    """Tiled operands, and the map of one head's function over all heads.

    Arrays are [K, N / K, tiles, B, tile, ...]; of keys and values [K, tiles, ...].
    """

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        work: TileWork,
        first_head: jax.Array | None,
    ):
        self._first_head = first_head
        self._kv_heads = k.shape[2]
        self._group = q.shape[2] // self._kv_heads
        self._lists = work.rows
        self._q = self.tile(q, work.tile.q)
        self._keys = _Keys(*(self.tile(x, work.tile.k)[:, 0] for x in (k, v)))

    def tile(self, x: jax.Array, size: int) -> jax.Array:
        """Tile [B, T, N, ...]; the last tile is padded with 0."""
        batch, tokens, heads, *rest = x.shape
        tiles = -(-tokens // size)
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, tiles * size - tokens)
        x = jnp.pad(x, padding)
        group = heads // self._kv_heads
        x = x.reshape(batch, tiles, size, self._kv_heads, group, *rest)
        return x.transpose(3, 4, 1, 0, 2, *range(5, x.ndim))

    def untile(self, x: jax.Array, tokens: int) -> jax.Array:
        """Undo `tile`."""
        kv_heads, group, tiles, batch, size, *rest = x.shape
        x = x.transpose(3, 2, 4, 0, 1, *range(5, x.ndim))
        return x.reshape(batch, tiles * size, kv_heads * group, *rest)[:, :tokens]

    def map(self, function: Callable[..., Any], *of_queries: _Saved) -> Any:
        """Call for every head; lists that all heads share are passed unchanged."""
        tiles = _Chunk(self._lists.tile_row, self._lists.column, self._lists.mask)
        over_lists = None
        if len(tiles.row) > 1:
            over_lists = 0
            tiles = _Chunk(*(self._own_heads(np.asarray(x)) for x in tiles))
        else:
            tiles = _Chunk(*(x[0] for x in tiles))
        over_queries = (0,) * len(of_queries)
        each = jax.vmap(function, in_axes=(0, None, over_lists, *over_queries))
        every = jax.vmap(each, in_axes=(0, 0, over_lists, *over_queries))
        return every(self._q, self._keys, tiles, *of_queries)

    def _own_heads(self, lists: np.ndarray) -> jax.Array:
        """From lists [all heads, E], those of the present heads."""
        first = 0 if self._first_head is None else self._first_head
        count = self._kv_heads * self._group
        own = jax.lax.dynamic_slice_in_dim(lists, first, count)
        return own.reshape(self._kv_heads, self._group, -1)


def _forward_head(
    q: jax.Array,
    keys: _Keys,
    tiles: _Chunk,
    *,
    limits: Limits,
    work: TileWork,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    def step(state, chunk: _Chunk):
        top, total, sums = state
        scores, is_visible = _scores(q, keys.k, chunk, limits, work, scale)
        new_top = top.at[chunk.row].max(scores.max(-1), mode="drop")
        p = _exp(scores, _rows(new_top, chunk.row), is_visible)
        kept = jnp.exp(top - new_top)
        total = (kept * total).at[chunk.row].add(p.sum(-1), mode="drop")
        values = keys.v[chunk.column]
        update = _product("ebqk,ebkh->ebqh", p.astype(values.dtype), values)
        sums = (kept[..., None] * sums).at[chunk.row].add(update, mode="drop")
        return (new_top, total, sums), None

    start = (
        jnp.full(q.shape[:-1], _NEVER, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    (top, total, sums), _ = jax.lax.scan(step, start, _chunks(tiles, q, work))
    o = sums / jnp.where(total > 0, total, 1.0)[..., None]
    return o, jnp.where(total > 0, top + jnp.log(total), -jnp.inf)


def _backward_head(
    q: jax.Array,
    keys: _Keys,
    tiles: _Chunk,
    saved: _Saved,
    *,
    limits: Limits,
    work: TileWork,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def step(state, chunk: _Chunk):
        dq, dk, dv = state
        scores, is_visible = _scores(q, keys.k, chunk, limits, work, scale)
        p = _exp(scores, _rows(saved.lse, chunk.row), is_visible)
        queries, do = _rows(q, chunk.row), _rows(saved.do, chunk.row)
        dp = _product("ebqh,ebkh->ebqk", do, keys.v[chunk.column])
        ds = scale * p * (dp - _rows(saved.delta, chunk.row)[..., None])
        ds, p = ds.astype(q.dtype), p.astype(do.dtype)
        update = _product("ebqk,ebkh->ebqh", ds, keys.k[chunk.column])
        dq = dq.at[chunk.row].add(update, mode="drop")
        dk = dk.at[chunk.column].add(_product("ebqk,ebqh->ebkh", ds, queries))
        dv = dv.at[chunk.column].add(_product("ebqk,ebqh->ebkh", p, do))
        return (dq, dk, dv), None

    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, *keys))
    start = (dq, dk, dv)
    return jax.lax.scan(step, start, _chunks(tiles, q, work))[0]


def _scores(
    q: jax.Array,
    k: jax.Array,
    chunk: _Chunk,
    limits: Limits,
    work: TileWork,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Scores [E, B, tile.q, tile.k], and which are visible ([E, 1 or B, ...])."""
    scores = scale * _product("ebqh,ebkh->ebqk", _rows(q, chunk.row), k[chunk.column])
    is_visible = _visible(chunk, limits, work)
    return jnp.where(is_visible, scores, _NEVER), is_visible


def _visible(chunk: _Chunk, limits: Limits, work: TileWork) -> jax.Array:
    tile = work.tile
    masks = jnp.asarray(work.masks)[chunk.mask]
    for axis, size in ((1, tile.q), (2, tile.k)):
        masks = masks.repeat(size // masks.shape[axis], axis)
    q_EQ1 = (chunk.row[:, None] * tile.q + np.arange(tile.q))[..., None]
    k_E1K = (chunk.column[:, None] * tile.k + np.arange(tile.k))[:, None]
    is_visible = masks & (k_E1K < work.seq_k) & (q_EQ1 < work.seq_q)
    if work.causal:
        is_visible &= k_E1K <= q_EQ1
    is_visible = is_visible[:, None]
    if limits.kv_seq_lens is not None:
        is_visible &= k_E1K[:, None] < limits.kv_seq_lens[None, :, None, None]
    if limits.segments_q is not None and limits.segments_k is not None:
        of_queries = _rows(limits.segments_q, chunk.row)[..., None]
        is_visible &= of_queries == limits.segments_k[chunk.column][:, :, None]
    return is_visible


def _exp(scores: jax.Array, of_row: jax.Array, is_visible: jax.Array) -> jax.Array:
    """exp of scores minus a number of their row, which is -inf if it sees nothing."""
    of_row = jnp.where(jnp.isfinite(of_row), of_row, 0.0)
    return jnp.where(is_visible, jnp.exp(scores - of_row[..., None]), 0.0)


def _rows(x: jax.Array, row: jax.Array | np.ndarray) -> jax.Array:
    """Take rows; those of a chunk's padding tiles are not used."""
    return x.at[row].get(mode="clip")


def _product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply with fp32 sums."""
    if x.dtype == jnp.float16:
        # XLA:CPU has no fp16 matmuls with fp32 sums (jax 0.10.2 to 0.12.0.1).
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def _tiled_limits(limits: Limits, work: TileWork) -> Limits:
    def tiled(x: jax.Array | None, size: int) -> jax.Array | None:
        if x is None:
            return None
        batch, tokens = x.shape
        tiles = -(-tokens // size)
        x = jnp.pad(x, ((0, 0), (0, tiles * size - tokens)))
        return x.reshape(batch, tiles, size).swapaxes(0, 1)

    return Limits(
        tiled(limits.segments_q, work.tile.q),
        tiled(limits.segments_k, work.tile.k),
        limits.kv_seq_lens,
        limits.first_head,
    )


def _chunks(tiles: _Chunk, q: jax.Array, work: TileWork) -> _Chunk:
    """Split the tiles into chunks whose scores are about as large as the queries."""
    count = tiles.row.shape[-1]
    size = work.tiles_q * q.shape[-1] // work.tile.k
    size = min(max(1, size), max(1, count))
    padding = -count % size
    fills = (work.tiles_q, 0, 0)
    return _Chunk(
        *(
            jnp.pad(jnp.asarray(x), (0, padding), constant_values=fill).reshape(
                -1, size
            )
            for x, fill in zip(tiles, fills, strict=True)
        )
    )
