"""What stands for a leaf on disk, in the state that steps carry?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpar.types import PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A leaf that is on disk: a node without leaves, which compiled functions skip.

    Attributes:
      shape: of the leaf.
      dtype: likewise.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


def is_on_disk(leaf: Any) -> bool:
    """Whether something is an `OnDisk`."""
    return isinstance(leaf, OnDisk)


def flat_leaves(state: PyTree) -> list[Any]:
    """The leaves of a tree, those on disk among them."""
    return jax.tree.leaves(state, is_leaf=is_on_disk)


def shapes_of(state: PyTree) -> PyTree:
    """A tree's shapes, without memories; of what is on disk as if it were here."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        if is_on_disk(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))

    return jax.tree.map(shape, state, is_leaf=is_on_disk)


def is_traced(state: PyTree) -> bool:
    """Whether a tree has values of a function that is being traced, or only shapes."""
    kinds = Tracer, jax.ShapeDtypeStruct
    # Where all leaves are on disk: while a function is traced, any operation is.
    leaves = jax.tree.leaves(state) or [jax.lax.add(1, 1)]
    return any(isinstance(leaf, kinds) for leaf in leaves)
