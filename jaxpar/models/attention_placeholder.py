"""How is cuDNN's attention compiled without a GPU: as a placeholder call.

cuDNN compiles its kernel on the GPU that will run it. A program compiled for an absent
GPU contains this call instead: it reads and writes the bytes of cuDNN's kernel, saves
the same residuals (one number per head and token besides the result), and carries its
FLOPs for `jaxpar.jaxprs.evaluate.flops`. It can be compiled, but never run.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.jaxprs.evaluate import PLACEHOLDER
from jaxpar.models.blocked_attention import PLAIN, Scoring
from jaxpar.models.shard_kernel import on_pieces, split_of

Results = tuple[jax.Array, ...]
Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def attention_placeholder(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
    scoring: Scoring = PLAIN,
) -> Float[Array, "B T N H"]:
    """Replace attention in a program that is compiled and never run.

    Two matmuls forward and five backward; under the causal mask over half of the
    scores, because blocks above the diagonal are skipped.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; each head of them serves N / K query heads.
      value_BSKH: values.
      scoring: which keys a query sees.

    Returns:
      An array of the result's shape.
    """
    return _placeholder(scoring, query_BTNH, key_BSKH, value_BSKH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _placeholder(
    scoring: Scoring,
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
) -> jax.Array:
    return _forward(scoring, query_BTNH, key_BSKH, value_BSKH)[0]


def _forward(
    scoring: Scoring,
    query_BTNH: jax.Array,
    key_BSKH: jax.Array,
    value_BSKH: jax.Array,
) -> tuple[jax.Array, Saved]:
    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> Results:
        batch, length, heads, _ = query.shape
        sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
        given = query, key, value
        return _call("forward", 2, scoring, *given, results=(query, sums))

    split = split_of(query_BTNH, key_BSKH)
    spec, of_sums = P(split.rows, None, split.heads, None), P(split.rows, split.heads)
    out, sums = on_pieces(call, (spec,) * 3, (spec, of_sums), split)(
        query_BTNH, key_BSKH, value_BSKH
    )
    return out, (query_BTNH, key_BSKH, value_BSKH, out, sums)


def _backward(
    scoring: Scoring, saved: Saved, cotangent_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def call(*args: jax.Array) -> Results:
        return _call("backward", 5, scoring, *args, results=args[:3])

    query, key, *_ = saved
    split = split_of(query, key)
    spec, of_sums = P(split.rows, None, split.heads, None), P(split.rows, split.heads)
    specs = (spec, spec, spec, spec, of_sums, spec)
    grads = on_pieces(call, specs, (spec,) * 3, split)(*saved, cotangent_BTNH)
    return grads[0], grads[1], grads[2]


_placeholder.defvjp(_forward, _backward)


def _call(
    name: str,
    products: int,
    scoring: Scoring,
    *args: jax.Array,
    results: Sequence[Any],
) -> Results:
    batch, length, heads, size = args[0].shape
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    # Two FLOPs per score and feature, of the scores that are computed.
    keys, window = args[1].shape[1], scoring.window
    halves = keys if scoring.causal else 2 * keys
    if window is not None and window < keys:
        halves = min(2 * window, keys)
    flops = products * batch * heads * length * halves * size
    call = jax.ffi.ffi_call(f"{PLACEHOLDER}.attention.{name}", shapes)
    return tuple(call(*args, flops=np.int64(flops)))
