"""What is a loss function given besides the model: rows, what is not rows, the step.

A batch is a pytree whose leaves count examples in their leading dim, but for what is
wrapped in `Replicated`: a class weight, a schedule's value, an adjacency matrix.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import DATA
from jaxpar.tree import named_leaves
from jaxpar.types import Batch, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replicated:
    """A part of a batch that is not rows: every device and micro-batch gets it whole.

    In a run of several processes each passes the same values. The loss function is
    given the value itself.

    Attributes:
      value: an array of any shape, or a pytree of them.

    Example:
      >>> batch = {"x": jnp.ones((8, 4)), "class_weight": Replicated(jnp.ones(3))}
      >>> num_rows(batch)
      8
    """

    value: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """A batch, or some of its rows, and the number of the step.

    Attributes:
      batch: as the user passed it, on the mesh.
      step: steps taken before this one; an int32 scalar, `Replicated`.
    """

    batch: Batch
    step: Any


def make_inputs(batch: Batch, step: Any) -> Inputs:
    """Join a batch and a step's number (an array or its shape)."""
    return Inputs(batch, Replicated(step))


def abstract_inputs(rows: Batch) -> Inputs:
    """The shapes of inputs, of the shapes of a batch."""
    return make_inputs(rows, jax.ShapeDtypeStruct((), jnp.int32))


def map_rows(fn: Callable[[Any], Any], batch: PyTree) -> PyTree:
    """Map the leaves that are rows; the others stay as they are."""
    return jax.tree.map(
        lambda x: x if isinstance(x, Replicated) else fn(x),
        batch,
        is_leaf=_is_replicated,
    )


def num_rows(batch: PyTree) -> int:
    """Count the examples."""
    leaves = jax.tree.leaves(batch, is_leaf=_is_replicated)
    return next(x.shape[0] for x in leaves if not _is_replicated(x))


def twice_the_rows(batch: PyTree) -> PyTree:
    """The shapes of a batch of twice as many rows."""

    def double(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

    return map_rows(double, batch)


def specs_of(batch: PyTree) -> PyTree:
    """Rows over data; what is `Replicated` on every device."""

    def spec(x: Any) -> Any:
        return jax.tree.map(lambda _: P(), x) if _is_replicated(x) else P(DATA)

    return jax.tree.map(spec, batch, is_leaf=_is_replicated)


def replicated_names(batch: PyTree) -> frozenset[str]:
    """Names of the leaves that are not rows."""

    def flag(x: Any) -> Any:
        return jax.tree.map(lambda _: True, x) if _is_replicated(x) else False

    flags = jax.tree.map(flag, batch, is_leaf=_is_replicated)
    return frozenset(name for name, is_set in named_leaves(flags).items() if is_set)


def unwrapped(batch: PyTree) -> PyTree:
    """The batch as the loss function sees it."""
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Replicated) else x,
        batch,
        is_leaf=_is_replicated,
    )


def _is_replicated(x: Any) -> bool:
    return isinstance(x, Replicated)
