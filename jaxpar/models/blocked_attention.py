"""How is attention computed without a kernel: by blocks of queries.

The scores of a block fit a cache, and under the causal mask it uses only the keys up to
its last row, which saves nearly half of the work. The backward pass receives the
arguments, the result and one number per row, and recomputes the probabilities in one
pass.
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
      causal: whether a query sees only keys up to its own place; a window needs it.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    causal: bool = True

    def scaled(self, head_size: int) -> float:
        """The scale, with None resolved."""
        return head_size**-0.5 if self.scale is None else self.scale

    def without_mask(self) -> "Scoring":
        """The same scores of every key, for callers that bring the whole mask."""
        return dataclasses.replace(self, window=None, causal=False)


PLAIN = Scoring()


def blocked_attention(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    mask_BNTS: Bool[Array, "B 1 T S"] | None = None,
    scoring: Scoring = PLAIN,
    bias_NTS: Float[Array, "N T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend, with scores and softmax in fp32.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; each head of them serves N / K query heads.
      value_BSKH: values.
      mask_BNTS: which keys a query may see, besides the causal mask; each row must
        see one.
      scoring: the scale, the window and the cap of scores. Keys that a window hides
        from a whole block of queries cost nothing.
      bias_NTS: what is added to the scores of every row of the batch.

    Returns:
      The weighted sums of values.

    Example:
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> blocked_attention(x, x, x).shape
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
    bias = None if bias_NTS is None else bias_NTS.reshape(K, N // K, T, -1)
    out: jax.Array = _attend(scoring, query, key, value, mask, bias)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scoring: Scoring,
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    mask_B11TS: jax.Array | None,
    bias_KGTS: jax.Array | None,
) -> jax.Array:
    given = query_BKGTH, key_BKSH, value_BKSH, mask_B11TS, bias_KGTS
    return _forward(scoring, *given)[0]


def _forward(
    scoring: Scoring,
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    mask_B11TS: jax.Array | None,
    bias_KGTS: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    outs, sums = [], []
    added = mask_B11TS, bias_KGTS
    for block in _blocks(query_BKGTH.shape[3], key_BKSH.shape[2], scoring):
        scores, _ = _scores(scoring, query_BKGTH, key_BKSH, added, block)
        largest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        value = value_BKSH[:, :, block.keys]
        out = _product("bkgts,bksh->bkgth", weights.astype(value.dtype), value)
        outs.append((out / total).astype(query_BKGTH.dtype))
        sums.append(largest + jnp.log(total))
    out, logsumexp = (jnp.concatenate(parts, axis=3) for parts in (outs, sums))
    return out, (query_BKGTH, key_BKSH, value_BKSH, added, out, logsumexp)


def _backward(scoring: Scoring, saved: tuple, cotangent_BKGTH: jax.Array) -> tuple:
    query, key, value, added, out, logsumexp = saved
    scale, length = scoring.scaled(query.shape[-1]), key.shape[2]
    query_grads, bias_grads = [], []
    key_grad, value_grad = (jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    for block in _blocks(query.shape[3], length, scoring):
        rows, seen = block.rows, block.keys
        missing = seen.start, length - seen.stop
        grad = cotangent_BKGTH[:, :, :, rows]
        scores, slope = _scores(scoring, query, key, added, block)
        weights = jnp.exp(scores - logsumexp[:, :, :, rows])
        # The softmax's own sum subtracts this: the same number for all keys of a row.
        shared = (grad.astype(jnp.float32) * out[:, :, :, rows]).sum(-1, keepdims=True)
        by_weight = _product("bkgth,bksh->bkgts", grad, value[:, :, seen])
        by_score = weights * (by_weight - shared)
        if added[1] is not None:
            bias_grads.append(_with_zeros(by_score.sum(0), -1, missing))
        by_score = by_score * scale if slope is None else by_score * (scale * slope)
        by_score = by_score.astype(query.dtype)
        weights = weights.astype(query.dtype)
        query_grads.append(_product("bkgts,bksh->bkgth", by_score, key[:, :, seen]))
        own_query = query[:, :, :, rows]
        by_key = _product("bkgts,bkgth->bksh", by_score, own_query)
        by_value = _product("bkgts,bkgth->bksh", weights, grad)
        key_grad += _with_zeros(by_key, 2, missing)
        value_grad += _with_zeros(by_value, 2, missing)
    return (
        jnp.concatenate(query_grads, axis=3).astype(query.dtype),
        key_grad.astype(key.dtype),
        value_grad.astype(value.dtype),
        None,
        jnp.concatenate(bias_grads, 2).astype(added[1].dtype) if bias_grads else None,
    )


_attend.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of queries, and the keys that any of them may see."""

    rows: slice
    keys: slice


def _blocks(length: int, keys: int, scoring: Scoring = PLAIN) -> Iterator[_Block]:
    size = max(BLOCK, math.ceil(length / MAX_BLOCKS))
    for start in range(0, length, size):
        end = min(start + size, length)
        first = 0 if scoring.window is None else max(0, start - scoring.window + 1)
        yield _Block(slice(start, end), slice(first, end if scoring.causal else keys))


def _scores(
    scoring: Scoring,
    query_BKGTH: jax.Array,
    key_BKSH: jax.Array,
    added: tuple[jax.Array | None, jax.Array | None],
    block: _Block,
) -> tuple[jax.Array, jax.Array | None]:
    """Masked scores of a block, fp32; and the slope of the cap, if there is one."""
    query, key = query_BKGTH[:, :, :, block.rows], key_BKSH[:, :, block.keys]
    scores = _product("bkgth,bksh->bkgts", query, key)
    scores, slope = scores * scoring.scaled(query.shape[-1]), None
    if scoring.softcap is not None:
        bent = jnp.tanh(scores / scoring.softcap)
        scores, slope = bent * scoring.softcap, 1 - bent * bent
    mask, bias = added
    if bias is not None:
        scores = scores + bias[:, :, block.rows, block.keys].astype(jnp.float32)
    own = jnp.arange(block.rows.start, block.rows.stop)[:, None]
    keys = jnp.arange(block.keys.start, block.keys.stop)
    conditions = []
    if scoring.causal:
        conditions.append(keys <= own)
    if scoring.window is not None:
        conditions.append(keys > own - scoring.window)
    if mask is not None:
        conditions.append(mask[:, :, :, block.rows, block.keys])
    if conditions:
        visible = functools.reduce(jnp.logical_and, conditions)
        scores = jnp.where(visible, scores, _MASKED)
    return scores, slope


def _with_zeros(x: jax.Array, dim: int, missing: tuple[int, int]) -> jax.Array:
    """An array of some keys, with zeros for those before and behind."""
    pads = [(0, 0)] * x.ndim
    pads[dim] = missing
    return jnp.pad(x, pads)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply with fp32 sums."""
    if jnp.float16 in (left.dtype, right.dtype):
        # XLA:CPU has no fp16 products with fp32 sums (jax 0.10.2 to 0.12.0.1).
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
