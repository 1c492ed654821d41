"""How is cuDNN's attention planned where there is no GPU: as a call of its size.

cuDNN compiles its kernel on the GPU that will run it. Compiled for one that is not
here, a program holds this call in its place: it reads and writes what cuDNN's does,
keeps what it keeps (one number per head and token besides the result), and carries its
operations for `jaxpar.jaxprs.flops`. It can be compiled, never run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.jaxprs import PLANNED
from jaxpar.mesh import DATA, TENSOR

Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def planned_attention(
    query_BTNH: Float[Array, "B T N H"],
    key_BSKH: Float[Array, "B S K H"],
    value_BSKH: Float[Array, "B S K H"],
) -> Float[Array, "B T N H"]:
    """Stand for causal attention in a program that is compiled and never run.

    Two products forward and five backward, of half the scores: blocks above the
    diagonal are skipped.

    Args:
      query_BTNH: queries.
      key_BSKH: keys; each head of them serves N / K query heads.
      value_BSKH: values.

    Returns:
      The shape of the result.
    """
    return _forward(query_BTNH, key_BSKH, value_BSKH)[0]


def _forward(
    query_BTNH: jax.Array, key_BSKH: jax.Array, value_BSKH: jax.Array
) -> tuple[jax.Array, Saved]:
    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> Sequence[jax.Array]:
        batch, length, heads, _ = query.shape
        sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
        return _call("forward", 2, query, key, value, results=(query, sums))

    heads, rows = _split(query_BTNH, key_BSKH)
    spec = P(rows, None, heads, None)
    out, sums = _on_pieces(
        call, (spec,) * 3, (spec, P(rows, heads, None)), heads, rows
    )(query_BTNH, key_BSKH, value_BSKH)
    return out, (query_BTNH, key_BSKH, value_BSKH, out, sums)


def _backward(
    saved: Saved, cotangent_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def call(*args: jax.Array) -> Sequence[jax.Array]:
        return _call("backward", 5, *args, results=args[:3])

    query, key, *_ = saved
    heads, rows = _split(query, key)
    spec = P(rows, None, heads, None)
    specs = (spec, spec, spec, spec, P(rows, heads, None), spec)
    grads = _on_pieces(call, specs, (spec,) * 3, heads, rows)(*saved, cotangent_BTNH)
    return grads[0], grads[1], grads[2]


planned_attention.defvjp(_forward, _backward)


def _call(
    name: str, products: int, *args: jax.Array, results: Sequence[Any]
) -> Sequence[jax.Array]:
    batch, length, heads, size = args[0].shape
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    # Half of two operations per score and feature.
    flops = products * batch * heads * length * args[1].shape[1] * size
    return jax.ffi.ffi_call(f"{PLANNED}.attention.{name}", shapes)(
        *args, flops=np.int64(flops)
    )


def _split(query: jax.Array, key: jax.Array) -> tuple[str | None, str | None]:
    """The axes that heads and rows are split over here, if the compiler places them."""
    mesh = jax.sharding.get_abstract_mesh()
    placed = {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[name] > 1
    }
    split_heads = TENSOR in placed and key.shape[2] % placed[TENSOR] == 0
    split_rows = DATA in placed and query.shape[0] % placed[DATA] == 0
    return TENSOR if split_heads else None, DATA if split_rows else None


def _on_pieces(
    call: Callable[..., Sequence[jax.Array]],
    ins: tuple[P, ...],
    outs: tuple[P, ...],
    *axes: str | None,
) -> Callable[..., Sequence[jax.Array]]:
    """A call on each device's piece, for the compiler can't split it."""
    names = {axis for axis in axes if axis is not None}
    if not names:
        return call

    def listed(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(call(*args))

    mapped = jax.shard_map(
        listed, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )
    return lambda *args: list(mapped(*args))
