"""How are values of some examples combined into the value of the global batch?

The mean over a shard of a masked batch is not the mean over the batch. A loss given
as `Weighted` is summed and divided over the global batch, so it is exact under every
mesh, ZeRO stage and accumulation. A metric may also be a `Sum` or a `Max`.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A metric that is summed over the global batch, such as a count.

    Attributes:
      value: the sum over the examples given; a scalar.
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A metric that is the maximum over the global batch.

    Attributes:
      value: the maximum over the examples given; a scalar.
    """

    value: Any


Reduced = Weighted | Sum | Max
"""A value of some examples that can be combined with that of others."""


def as_weighted(value: Any, name: str, num_rows: int) -> Weighted:
    """Convert a mean over examples to their sum and number, in fp32.

    Args:
      value: a scalar or a `Weighted`.
      name: its name, for the error.
      num_rows: the number of examples that a plain scalar is the mean of.

    Returns:
      A `Weighted` of two fp32 scalars.

    Raises:
      ValueError: if `value` is not a scalar, or not made of scalars.
    """
    if not isinstance(value, Weighted):
        _require_scalars(name, value)
        value = Weighted(jnp.asarray(value, jnp.float32) * num_rows, num_rows)
    return _as_fp32(name, value)


def as_reduced(value: Any, name: str, num_rows: int) -> Reduced:
    """As `as_weighted`, but a `Sum` or a `Max` stays one."""
    if isinstance(value, Sum | Max):
        return _as_fp32(name, value)
    return as_weighted(value, name, num_rows)


def merged(numbers: Any, others: Any) -> Any:
    """Combine the values of some examples with those of others.

    Args:
      numbers: a pytree of `Weighted`, `Sum` and `Max`.
      others: the same of other examples.
    """

    def merge(one: Reduced, other: Reduced) -> Reduced:
        combine = jnp.maximum if isinstance(one, Max) else jnp.add
        return jax.tree.map(combine, one, other)

    return jax.tree.map(merge, numbers, others, is_leaf=is_reduced)


def of_no_examples(shapes: Any) -> Any:
    """The values for no examples, which `merged` leaves out.

    Args:
      shapes: a pytree of `Weighted`, `Sum` and `Max` of shapes or arrays.
    """

    def empty(one: Reduced) -> Reduced:
        value = -jnp.inf if isinstance(one, Max) else 0.0
        return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), one)

    return jax.tree.map(empty, shapes, is_leaf=is_reduced)


def is_reduced(value: Any) -> bool:
    """Whether a value is a `Weighted`, a `Sum` or a `Max`."""
    return isinstance(value, Weighted | Sum | Max)


def result(value: Reduced) -> jax.Array:
    """The final value, after all examples are merged."""
    return mean(value) if isinstance(value, Weighted) else value.value


def mean(value: Weighted) -> jax.Array:
    """Divide; a zero weight gives 0."""
    positive = value.weight > 0
    return jnp.where(
        positive, value.total / jnp.where(positive, value.weight, 1.0), 0.0
    )


def _as_fp32(name: str, value: Reduced) -> Any:
    _require_scalars(name, *(getattr(value, f.name) for f in dataclasses.fields(value)))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), value)


def _require_scalars(name: str, *parts: Any) -> None:
    for part in parts:
        is_array = isinstance(part, _ARRAYS)
        if not is_array or jnp.shape(part) != ():
            found = f"has shape {jnp.shape(part)}" if is_array else f"is {part!r}"
            raise ValueError(
                f"loss_fn: {name} {found}, but must be a scalar. "
                "Return a mean over the examples (.mean()), or jaxpar.Weighted(total, "
                "weight) of two sums."
            )
