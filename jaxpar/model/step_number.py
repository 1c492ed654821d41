"""How does a module know the number of the training step?

A module that depends on it (a warm-up of a rate, a stochastic depth) holds a `Step`, or
in Linen reads a variable "step" of the collection "context". It is set before every
call, is not state of the model, and has the same value on all devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import tree

CONTEXT = "context"
"""The Linen collection."""

STEP = "step"
"""The variable in it."""


class Step(nnx.Variable):
    """The number of steps taken before this one, as a variable of an NNX module.

    It may be anywhere in the model, in scanned and pipelined blocks too. In an
    evaluation it is the number of all steps taken.

    Example:
      >>> class Warm(nnx.Module):
      ...     def __init__(self, rngs: nnx.Rngs):
      ...         self.step = Step(jnp.int32(0))
      ...
      ...     def __call__(self, x: jax.Array) -> jax.Array:
      ...         return x * jnp.minimum(self.step[...] / 100, 1.0)
    """


def filled(like: Any, step: Any) -> jax.Array:
    """The step's number in the shape and dtype of a variable's value.

    Args:
      like: the variable's value, or its shape; a dim where a module is stacked.
      step: the number, a scalar; None for 0.
    """
    number = jnp.asarray(0 if step is None else step, like.dtype)
    return jnp.broadcast_to(number, like.shape)


def is_context(collection: Any) -> bool:
    """Whether a Linen collection holds nothing but the step's number."""
    names = [name.split("/")[-1] for name in tree.named_leaves(collection)]
    return bool(names) and set(names) == {STEP}
