"""How is causal attention computed without a kernel: by blocks of queries.

A block of queries uses only the keys up to its last row, which saves nearly half of the
work, and its scores fit a cache. The backward pass receives the arguments, the result
and one number per row, and recomputes the probabilities in one pass.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

BLOCK = 64
"""Rows of a block of queries, unless that gives more blocks than the maximum."""

MAX_BLOCKS = 16
"""Most blocks: each is unrolled into the program."""

_MASKED = -1e30


def causal_attention(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B T K H"],
    value_BSKH: Float[Array, "B T K H"],
    mask_BNTS: Bool[Array, "B 1 T T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend causally, with scores and softmax in fp32.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; each head of them serves N / K query heads.
      value_BSKH: values.
      mask_BNTS: which keys a query may see, besides the causal mask; each row must
        see one.

    Returns:
      The weighted sums of values.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> causal_attention(x, x, x).shape
      (1, 4, 2, 8)

    Source: Rabe, Staats, "Self-attention Does Not Need O(n^2) Memory" (2021); Dao et
    al., "FlashAttention" (2022), algorithm 4 for the backward pass. Differs: a block of
    queries sees all of its keys at once.
    """
    B, T, N, H = query_BTNH.shape
    K = key_BSKH.shape[2]
    query = query_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    key, value = (x.transpose(0, 2, 1, 3) for x in (key_BSKH, value_BSKH))
    mask = None if mask_BNTS is None else mask_BNTS[:, :, None]
    out = _attend(query, key, value, mask)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@jax.custom_vjp
def _attend(
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    mask_B11TS: jax.Array | None,
) -> jax.Array:
    return _forward(query_BKGTH, key_BKSH, value_BKSH, mask_B11TS)[0]


def _forward(
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    mask_B11TS: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    outs, sums = [], []
    for rows in _blocks(query_BKGTH.shape[3]):
        scores = _scores(query_BKGTH, key_BKSH, mask_B11TS, rows)
        largest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        value = value_BKSH[:, :, : rows.stop]
        out = _product("bkgts,bksh->bkgth", weights.astype(value.dtype), value)
        outs.append((out / total).astype(query_BKGTH.dtype))
        sums.append(largest + jnp.log(total))
    out, logsumexp = (jnp.concatenate(parts, axis=3) for parts in (outs, sums))
    return out, (query_BKGTH, key_BKSH, value_BKSH, mask_B11TS, out, logsumexp)


def _backward(saved: tuple, cotangent_BKGTH: jax.Array) -> tuple:
    query, key, value, mask, out, logsumexp = saved
    scale = query.shape[-1] ** -0.5
    query_grads = []
    key_grad, value_grad = (jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    for rows in _blocks(query.shape[3]):
        grad = cotangent_BKGTH[:, :, :, rows]
        weights = jnp.exp(_scores(query, key, mask, rows) - logsumexp[:, :, :, rows])
        # The softmax's own sum subtracts this: the same number for all keys of a row.
        shared = (grad.astype(jnp.float32) * out[:, :, :, rows]).sum(-1, keepdims=True)
        seen = slice(0, rows.stop)
        by_weight = _product("bkgth,bksh->bkgts", grad, value[:, :, seen])
        by_score = (weights * (by_weight - shared) * scale).astype(query.dtype)
        weights = weights.astype(query.dtype)
        query_grads.append(_product("bkgts,bksh->bkgth", by_score, key[:, :, seen]))
        own_query = query[:, :, :, rows]
        key_grad += _padded("bkgts,bkgth->bksh", by_score, own_query, key.shape[2])
        value_grad += _padded("bkgts,bkgth->bksh", weights, grad, key.shape[2])
    return (
        jnp.concatenate(query_grads, axis=3).astype(query.dtype),
        key_grad.astype(key.dtype),
        value_grad.astype(value.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)


def _blocks(length: int) -> Iterator[slice]:
    """Rows of each block of queries."""
    size = max(BLOCK, math.ceil(length / MAX_BLOCKS))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _scores(
    query_BKGTH: jax.Array, key_BKSH: jax.Array, mask: jax.Array | None, rows: slice
) -> jax.Array:
    """Masked scores of a block of queries with every key up to its last row, fp32."""
    query, key = query_BKGTH[:, :, :, rows], key_BKSH[:, :, : rows.stop]
    scores = _product("bkgth,bksh->bkgts", query, key) * query.shape[-1] ** -0.5
    own = jnp.arange(rows.start, rows.stop)[:, None]
    visible = jnp.arange(rows.stop) <= own
    if mask is not None:
        visible = visible & mask[:, :, :, rows, : rows.stop]
    return jnp.where(visible, scores, _MASKED)


def _padded(spec: str, left: jax.Array, right: jax.Array, length: int) -> jax.Array:
    """A matmul over the first keys, with zeros for the others."""
    part_BKSH = _product(spec, left, right)
    missing = length - part_BKSH.shape[2]
    return jnp.pad(part_BKSH, ((0, 0), (0, 0), (0, missing), (0, 0)))


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply with fp32 sums."""
    if jnp.float16 in (left.dtype, right.dtype):
        # XLA:CPU has no fp16 products with fp32 sums (jax 0.10.2 to 0.12.0.1).
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
