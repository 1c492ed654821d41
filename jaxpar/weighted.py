"""What is a loss over unequal weights: a total and a weight, divided at the very end.

The mean over a shard of a masked batch is not the mean over the batch. A loss given
as `Weighted` is summed and divided over the global batch, so it is exact under every
mesh, ZeRO stage and accumulation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Not jax.typing.ArrayLike: Python 3.11 finds no tracer in a union.
_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A sum and the weight to divide it by, once, over the global batch.

    An auxiliary mean joins as ``Weighted(total + aux * n, n)``; the weight must not
    depend on the parameters.

    Attributes:
      total: the weighted sum over the examples (or tokens) given; a scalar.
      weight: the sum of their weights; a scalar.

    Example:
      >>> token_losses, mask = jnp.array([3.0, 1.0, 5.0]), jnp.array([1.0, 1.0, 0.0])
      >>> float(mean(Weighted((token_losses * mask).sum(), mask.sum())))
      2.0
    """

    total: Any
    weight: Any


def as_weighted(value: Any, name: str, num_rows: int) -> Weighted:
    """See a mean over examples as their sum, with their number as the weight; fp32.

    Args:
      value: a scalar or a `Weighted`.
      name: what it is, for the error.
      num_rows: the examples that a plain scalar is the mean of.

    Returns:
      A `Weighted` of two fp32 scalars.

    Raises:
      ValueError: if `value` is not made of scalars.
    """
    is_weighted = isinstance(value, Weighted)
    for part in (value.total, value.weight) if is_weighted else (value,):
        is_array = isinstance(part, _ARRAYS)
        if not is_array or jnp.shape(part) != ():
            found = f"has shape {jnp.shape(part)}" if is_array else f"is {part!r}"
            raise ValueError(
                f"loss_fn: {name} {found}, but must be a scalar. "
                "Return a mean over the examples (.mean()), or jaxpar.Weighted(total, "
                "weight) of two sums."
            )
    if not is_weighted:
        value = Weighted(value * num_rows, num_rows)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), value)


def mean(value: Weighted) -> jax.Array:
    """Divide; a zero weight gives 0."""
    positive = value.weight > 0
    return jnp.where(
        positive, value.total / jnp.where(positive, value.weight, 1.0), 0.0
    )
