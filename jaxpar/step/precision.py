"""In which dtypes are arrays stored, computed and reduced?

Parameters are stored as fp32 masters at every precision. The compute copy is cast from
them before it is gathered. Gradients are reduced over data in `reduce_dtype`, and
summed over micro-batches, clipped and applied in fp32.
"""

import dataclasses

import jax.numpy as jnp

from jaxpar.tree import near_match


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a training step.

    Attributes:
      compute_dtype: of the parameters that the loss function sees.
      reduce_dtype: of the reduction of gradients over data.
      scales_loss: whether the loss is scaled dynamically, as fp16 needs.
    """

    compute_dtype: jnp.dtype
    reduce_dtype: jnp.dtype
    scales_loss: bool = False


_COMPUTE_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


def make_precision(name: str | Precision, reduce_dtype: str | None = None) -> Precision:
    """Look a precision up by name.

    Args:
      name: "fp32", "bf16" or "fp16" (with dynamic loss scaling), or a `Precision`,
        which is returned as it is.
      reduce_dtype: one of the same names, for the reduction of gradients; None for the
        compute dtype.

    Returns:
      The dtypes of the step.

    Raises:
      ValueError: for another name.

    Example:
      >>> make_precision("bf16", reduce_dtype="fp32").reduce_dtype
      dtype('float32')
    """
    if isinstance(name, Precision):
        return name
    compute = _dtype("precision", name)
    reduce = compute if reduce_dtype is None else _dtype("reduce_dtype", reduce_dtype)
    return Precision(compute, reduce, scales_loss=name == "fp16")


def _dtype(argument: str, name: str) -> jnp.dtype:
    if name not in _COMPUTE_DTYPES:
        known = ", ".join(map(repr, _COMPUTE_DTYPES))
        raise ValueError(
            f"{argument}={name!r} must be one of {known}."
            f"{near_match(str(name), _COMPUTE_DTYPES)}"
        )
    return jnp.dtype(_COMPUTE_DTYPES[name])


def frozen_dtype(dtype: jnp.dtype, compute_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which a parameter that is not trained is gathered and computed on.

    Args:
      dtype: in which it is stored.
      compute_dtype: of the parameters that are trained.

    Returns:
      The compute dtype for wider floats, else its own.
    """
    wider = dtype.itemsize > compute_dtype.itemsize
    return compute_dtype if jnp.issubdtype(dtype, jnp.floating) and wider else dtype
