"""How is block-sparse attention differentiated: one rule for all implementations."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_sparse_attention.operands import Limits
from kernels_pallas.block_sparse_attention.tile_work import TileWork


class Implementation(NamedTuple):
    """The two functions documented in `reference`; static, so compared by identity."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    scale: float,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """Attend, with a gradient.

    Args:
      q_BTNH: queries.
      k_BSKH: keys.
      v_BSKH: values.
      limits: limits on what a query sees, besides the tile work's.
      work: the work.
      scale: of the scores.
      implementation: the two functions to use.

    Returns:
      The result, [B, T, N, H], and the logarithm of each softmax's sum, [B, N, T].
    """
    return implementation.forward(q_BTNH, k_BSKH, v_BSKH, limits, work, scale)


def _attend_forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    limits: Limits,
    work: TileWork,
    scale: float,
    implementation: Implementation,
) -> tuple[Any, Any]:
    o_BTNH, lse_BNT = implementation.forward(
        q_BTNH, k_BSKH, v_BSKH, limits, work, scale
    )
    return (o_BTNH, lse_BNT), (q_BTNH, k_BSKH, v_BSKH, limits, o_BTNH, lse_BNT)


def _attend_backward(
    work: TileWork,
    scale: float,
    implementation: Implementation,
    saved: Any,
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, Limits]:
    q_BTNH, k_BSKH, v_BSKH, limits, o_BTNH, lse_BNT = saved
    do_BTNH, dlse_BNT = cotangents
    delta_BNT = jnp.einsum(
        "btnh,btnh->bnt", o_BTNH, do_BTNH, preferred_element_type=jnp.float32
    )
    dq, dk, dv = implementation.backward(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        limits,
        work,
        scale,
        lse_BNT,
        delta_BNT - dlse_BNT,
        do_BTNH,
    )
    # Integers have cotangents of a special dtype.
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), limits)
    return dq, dk, dv, none


attend.defvjp(_attend_forward, _attend_backward)
