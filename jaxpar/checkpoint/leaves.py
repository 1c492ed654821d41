"""Which named arrays does a tree have, and does a checkpoint have the same ones?

A checkpoint stores a tree as {name: array}, where the name is the path to the leaf:
"params/blocks/kernel". It depends on no Python class, and any tree with the same names,
shapes and dtypes can load its arrays. Typed PRNG keys are stored as their integers; the
table of leaves stores the name of their implementation.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.tree import is_key, key_impl, path_name, stored_struct

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Shape and dtype of one leaf; dtype "key<threefry2x32>" for typed PRNG keys."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def stored(self) -> "LeafSpec":
        """The spec of the plain array on disk: keys are stored as integers.

        Raises:
            ValueError: If there is no such dtype.
        """
        kind = _KEY.fullmatch(self.dtype)
        if kind is None:
            return LeafSpec(self.shape, str(_dtype(self.dtype)))
        words = _words_of(kind[1])
        return LeafSpec((*self.shape, words), "uint32")

    @property
    def is_floating(self) -> bool:
        """Whether it is of a floating dtype."""
        return jnp.issubdtype(_dtype(self.stored.dtype), jnp.floating)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array on disk."""
        stored = self.stored
        return math.prod(stored.shape) * _dtype(stored.dtype).itemsize


_KEY = re.compile(r"key<(\w+)>")


@functools.cache
def _words_of(impl: str) -> int:
    """Number of integers in a key."""
    made = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
    return made.shape[-1]


def _dtype(name: str) -> np.dtype:
    dtype = jnp.dtype(name)
    is_number = jnp.issubdtype(dtype, jnp.number) or dtype.kind == "b"
    if not is_number or str(dtype) != name:
        raise ValueError(f"{name!r} is not a dtype of numbers")
    return dtype


def array_leaves(tree: Any, argument: str) -> dict[str, Any]:
    """Flatten a tree of arrays into its leaves by path name.

    Args:
        tree: Nested tree of jax.Array or jax.ShapeDtypeStruct.
        argument: The name of the tree for the caller, for error messages.

    Returns:
        The leaves by name, in the tree's own order.

    Raises:
        TypeError: If a leaf is neither a jax.Array nor a jax.ShapeDtypeStruct.
        ValueError: If there is no leaf, or two leaves have the same name.

    Example:
        >>> list(array_leaves({"w": {0: jnp.ones(2)}, "b": jnp.ones(2)}, "tree"))
        ['b', 'w/0']
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = path_name(path) or "value"
        if name in leaves:
            raise ValueError(
                f"{argument} has two leaves named {name!r}; a checkpoint stores "
                "leaves by path, joined with '/': rename one of the keys"
            )
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            raise TypeError(
                f"{argument} leaf {name!r} is {type(leaf).__name__}; every leaf must "
                "be a jax.Array: wrap it with jax.numpy.asarray, or store it in meta"
            )
        leaves[name] = leaf
    if not leaves:
        raise ValueError(f"{argument} has no leaves; give a tree with arrays")
    return leaves


def require_global(leaves: Mapping[str, Any]) -> None:
    """Reject leaves that can't be saved: structs, arrays of one process of several."""
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"tree leaf {name!r} is a jax.ShapeDtypeStruct, which has no values; "
                "save the tree of arrays"
            )
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"tree leaf {name!r} is only on the devices of one process of "
                f"{jax.process_count()}; place it on the mesh of all of them with "
                "jax.make_array_from_callback, or store it in meta"
            )


def require_shardings(targets: Mapping[str, Any]) -> None:
    """Reject leaves without a sharding to restore to."""
    for name, target in targets.items():
        if target.sharding is None:
            raise ValueError(
                f"target leaf {name!r} has no sharding; give every "
                "jax.ShapeDtypeStruct a sharding="
            )


def leaf_specs(leaves: Mapping[str, Any]) -> dict[str, LeafSpec]:
    """Return the table of a checkpoint: shape and dtype of every leaf by name."""
    return {
        name: LeafSpec(
            tuple(leaf.shape),
            f"key<{key_impl(leaf)}>" if is_key(leaf) else str(leaf.dtype),
        )
        for name, leaf in leaves.items()
    }


def describe_mismatch(
    found: Mapping[str, LeafSpec], stored: Mapping[str, LeafSpec]
) -> str | None:
    """Describe how a tree's table differs from a checkpoint's, up to ten of each kind.

    Args:
        found: The table of the tree.
        stored: The table in the checkpoint.

    Returns:
        Indented lines with names, shapes and dtypes; None if the tables are equal.

    Example:
        >>> new, old = LeafSpec((2,), "int32"), LeafSpec((3,), "int32")
        >>> print(describe_mismatch({"a": new, "b": new}, {"a": old}))
          1 leaf is not in the checkpoint:
            b: int32[2]
          1 leaf has another shape or dtype:
            a: int32[2], in the checkpoint int32[3]
    """
    absent = [f"{name}: {spec}" for name, spec in found.items() if name not in stored]
    extra = [f"{name}: {spec}" for name, spec in stored.items() if name not in found]
    changed = [
        f"{name}: {spec}, in the checkpoint {stored[name]}"
        for name, spec in found.items()
        if name in stored and stored[name] != spec
    ]
    lines = [
        *_paragraph(absent, "is not in the checkpoint", "are not in the checkpoint"),
        *_paragraph(extra, "is only in the checkpoint", "are only in the checkpoint"),
        *_paragraph(
            changed, "has another shape or dtype", "have another shape or dtype"
        ),
    ]
    return "\n".join(lines) or None


def _paragraph(leaves: list[str], singular: str, plural: str) -> list[str]:
    if not leaves:
        return []
    if len(leaves) == 1:
        head = f"  1 leaf {singular}:"
    else:
        head = f"  {len(leaves)} leaves {plural}:"
    more = [f"    and {len(leaves) - _SHOWN} more"] if len(leaves) > _SHOWN else []
    return [head, *(f"    {leaf}" for leaf in leaves[:_SHOWN]), *more]


def empty(target: Any) -> jax.Array:
    """The stored array of a leaf without elements."""
    struct = stored_struct(target)
    return jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)
