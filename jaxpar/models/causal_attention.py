"""How is causal attention computed without a kernel: by blocks of queries.

A block of queries uses only the keys up to its last row, which saves nearly half of the
work, and its scores fit a cache. The backward pass receives the arguments, the result
and one number per row, and recomputes the probabilities in one pass.
"""

import dataclasses
import functools
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


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a query scores keys.

    Attributes:
      scale: what the product of a query and a key is multiplied by; None for
        1 / sqrt(H).
      window: a query sees this many keys, its own among them; None for all.
      softcap: scores are bent by ``cap * tanh(score / cap)`` into (-cap, cap); None for
        no cap. Source: Gemma Team, "Gemma 2" (2024), section 2.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def scaled(self, head_size: int) -> float:
        """The scale, with None resolved."""
        return head_size**-0.5 if self.scale is None else self.scale

    @property
    def is_plain(self) -> bool:
        """Whether scores are scaled alone."""
        return self.window is None and self.softcap is None


PLAIN = Scoring()


def causal_attention(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B T K H"],
    value_BSKH: Float[Array, "B T K H"],
    mask_BNTS: Bool[Array, "B 1 T T"] | None = None,
    scoring: Scoring = PLAIN,
) -> Float[Array, "B T N H"]:
    """Attend causally, with scores and softmax in fp32.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; each head of them serves N / K query heads.
      value_BSKH: values.
      mask_BNTS: which keys a query may see, besides the causal mask; each row must
        see one.
      scoring: the scale, the window and the cap of scores. Keys that a window hides
        from a whole block of queries cost nothing.

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
    out: jax.Array = _attend(scoring, query, key, value, mask)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scoring: Scoring,
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    mask_B11TS: jax.Array | None,
) -> jax.Array:
    return _forward(scoring, query_BKGTH, key_BKSH, value_BKSH, mask_B11TS)[0]


def _forward(
    scoring: Scoring,
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    mask_B11TS: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    outs, sums = [], []
    for block in _blocks(query_BKGTH.shape[3], scoring.window):
        scores, _ = _scores(scoring, query_BKGTH, key_BKSH, mask_B11TS, block)
        largest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        value = value_BKSH[:, :, block.keys]
        out = _product("bkgts,bksh->bkgth", weights.astype(value.dtype), value)
        outs.append((out / total).astype(query_BKGTH.dtype))
        sums.append(largest + jnp.log(total))
    out, logsumexp = (jnp.concatenate(parts, axis=3) for parts in (outs, sums))
    return out, (query_BKGTH, key_BKSH, value_BKSH, mask_B11TS, out, logsumexp)


def _backward(scoring: Scoring, saved: tuple, cotangent_BKGTH: jax.Array) -> tuple:
    query, key, value, mask, out, logsumexp = saved
    scale = scoring.scaled(query.shape[-1])
    query_grads = []
    key_grad, value_grad = (jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    for block in _blocks(query.shape[3], scoring.window):
        rows, seen = block.rows, block.keys
        grad = cotangent_BKGTH[:, :, :, rows]
        scores, slope = _scores(scoring, query, key, mask, block)
        weights = jnp.exp(scores - logsumexp[:, :, :, rows])
        # The softmax's own sum subtracts this: the same number for all keys of a row.
        shared = (grad.astype(jnp.float32) * out[:, :, :, rows]).sum(-1, keepdims=True)
        by_weight = _product("bkgth,bksh->bkgts", grad, value[:, :, seen])
        by_score = weights * (by_weight - shared) * scale
        by_score = by_score if slope is None else by_score * slope
        by_score = by_score.astype(query.dtype)
        weights = weights.astype(query.dtype)
        query_grads.append(_product("bkgts,bksh->bkgth", by_score, key[:, :, seen]))
        own_query, length = query[:, :, :, rows], key.shape[2]
        key_grad += _padded("bkgts,bkgth->bksh", by_score, own_query, seen, length)
        value_grad += _padded("bkgts,bkgth->bksh", weights, grad, seen, length)
    return (
        jnp.concatenate(query_grads, axis=3).astype(query.dtype),
        key_grad.astype(key.dtype),
        value_grad.astype(value.dtype),
        None,
    )


_attend.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of queries, and the keys that any of them may see."""

    rows: slice
    keys: slice


def _blocks(length: int, window: int | None = None) -> Iterator[_Block]:
    size = max(BLOCK, math.ceil(length / MAX_BLOCKS))
    for start in range(0, length, size):
        end = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1)
        yield _Block(slice(start, end), slice(first, end))


def _scores(
    scoring: Scoring,
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    mask: jax.Array | None,
    block: _Block,
) -> tuple[jax.Array, jax.Array | None]:
    """Masked scores of a block, fp32; and the slope of the cap, if there is one."""
    query, key = query_BKGTH[:, :, :, block.rows], key_BKSH[:, :, block.keys]
    scores = _product("bkgth,bksh->bkgts", query, key)
    scores, slope = scores * scoring.scaled(query.shape[-1]), None
    if scoring.softcap is not None:
        bent = jnp.tanh(scores / scoring.softcap)
        scores, slope = bent * scoring.softcap, 1 - bent * bent
    own = jnp.arange(block.rows.start, block.rows.stop)[:, None]
    keys = jnp.arange(block.keys.start, block.keys.stop)
    visible = keys <= own
    if scoring.window is not None:
        visible = visible & (keys > own - scoring.window)
    if mask is not None:
        visible = visible & mask[:, :, :, block.rows, block.keys]
    return jnp.where(visible, scores, _MASKED), slope


def _padded(
    spec: str, left: jax.Array, right: jax.Array, keys: slice, length: int
) -> jax.Array:
    """A matmul over some keys, with zeros for the others."""
    part_BKSH = _product(spec, left, right)
    missing = keys.start, length - keys.stop
    return jnp.pad(part_BKSH, ((0, 0), (0, 0), missing, (0, 0)))


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply with fp32 sums."""
    if jnp.float16 in (left.dtype, right.dtype):
        # XLA:CPU has no fp16 products with fp32 sums (jax 0.10.2 to 0.12.0.1).
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
