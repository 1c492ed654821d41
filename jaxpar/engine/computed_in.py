"""Does a model compute in the precision that was asked for?

Parameters are cast, but a module may cast them back: flax's `nnx.Embed` computes in the
dtype that its table had when it was made, fp32, and what reads its output follows.
"""

import jax.numpy as jnp
from jax.extend import core

from jaxpar.jaxprs.evaluate import flops, shape_of
from jaxpar.step.precision import Precision

_PRODUCTS = ("dot_general", "conv_general_dilated")
_SHARE = 0.5
"""Of the matmuls' FLOPs: the smallest in fp32 that is worth a line."""


def fp32_notes(jaxpr: core.Jaxpr, precision: Precision) -> tuple[str, ...]:
    """A line about matmuls that compute in fp32 where half precision is asked for.

    Args:
      jaxpr: a loss's, in the step's precision.
      precision: the step's precision.

    Returns:
      No line, or one.
    """
    if precision.compute_dtype == jnp.float32:
        return ()
    share = flops(jaxpr.eqns, only=_is_in_fp32) / max(1, flops(jaxpr.eqns))
    if share < _SHARE:
        return ()
    name = jnp.dtype(precision.compute_dtype).name
    return (
        f"precision: {share:.0%} of the matmuls' FLOPs are in float32, not {name}: "
        "slower, and activations take twice the memory. Cast fp32 inputs in loss_fn, "
        f"and give modules that keep a dtype, such as nnx.Embed, dtype=jnp.{name}.",
    )


def _is_in_fp32(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name not in _PRODUCTS:
        return False
    return any(shape_of(atom).dtype == jnp.float32 for atom in eqn.invars)
