"""How are leaves named, counted and selected?

A leaf's name is its path joined by slashes (``blocks/attn/q/kernel``): the same in
error messages, rules, reports and checkpoints.
"""

import difflib
import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Params, PyTree


def path_name(path: Sequence[Any]) -> str:
    """Name a leaf by its key path.

    Args:
      path: a key path, as ``jax.tree_util.tree_flatten_with_path`` gives it.

    Returns:
      The keys joined by slashes; an empty string for a bare leaf.

    Example:
      >>> [(path, _)], _ = jax.tree_util.tree_flatten_with_path({"a": {"b": 1}})
      >>> path_name(path)
      'a/b'
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def named_leaves(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """List a tree's leaves by name, in flattening order.

    Args:
      tree: any pytree.
      is_leaf: which inner nodes to treat as leaves; None for none.

    Returns:
      name -> leaf.

    Example:
      >>> named_leaves({"a": {"b": 1, "c": 2}})
      {'a/b': 1, 'a/c': 2}
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {path_name(path): leaf for path, leaf in flat}


def matches(pattern: str, name: str) -> bool:
    """Whether a leaf's name matches a shell-style pattern (``*/attn/*/kernel``).

    A star also matches slashes, and a pattern that starts with ``*/`` also matches
    names without that first part.
    """
    return fnmatch.fnmatchcase(name, pattern) or (
        pattern.startswith("*/") and fnmatch.fnmatchcase(name, pattern[2:])
    )


def num_elements(tree: PyTree) -> int:
    """Count the elements of all leaves (arrays or shape structs)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
    """Count the bytes of all leaves, unsharded."""
    return sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def near_match(word: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Suggest the nearest known word, as the end of an error message.

    Args:
      word: the given word.
      known: the valid words.
      cutoff: the least similarity, from 0 to 1 (equal).

    Returns:
      ``" Did you mean 'x'?"``, or an empty string where nothing is near.
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def with_dtype(arrays: PyTree, dtype: np.dtype) -> PyTree:
    """The shapes of a tree of arrays, in another dtype."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), arrays)


def zeros(arrays: PyTree) -> PyTree:
    """Zeros of arrays' shapes, dtypes and shardings; not traceable."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), arrays
    )


def without_leaf(params: Params, path: Sequence[str]) -> Params:
    """Remove a leaf of a nested dict, and dicts that become empty, from a copy."""
    rest = {key: value for key, value in params.items() if key != path[0]}
    if len(path) > 1:
        inner = without_leaf(params[path[0]], path[1:])
        return rest | ({path[0]: inner} if inner else {})
    return rest


def with_leaf(params: Params, path: Sequence[str], leaf: jax.Array) -> Params:
    """Add or replace a leaf of a nested dict; the dict itself is unchanged."""
    if len(path) == 1:
        return {**params, path[0]: leaf}
    inner = with_leaf(params.get(path[0], {}), path[1:], leaf)
    return {**params, path[0]: inner}


def parted(tree: PyTree, names: Collection[str]) -> tuple[PyTree, PyTree]:
    """Part a nested dict: the leaves of these names, and the others.

    Example:
      >>> parted({"a": {"b": 1, "c": 2}}, ["a/b"])
      ({'a': {'b': 1}}, {'a': {'c': 2}})
    """
    found: tuple[dict, dict] = ({}, {})
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    if all(path_name(path) in names for path, _ in flat):
        return tree, {}  # With its empty dicts.
    for path, leaf in flat:
        node = found[path_name(path) not in names]
        for part in path[:-1]:
            node = node.setdefault(part.key, {})
        node[path[-1].key] = leaf
    return found


def merged(one: PyTree, other: PyTree) -> PyTree:
    """Undo `parted`.

    Example:
      >>> merged({"a": {"b": 1}}, {"a": {"c": 2}})
      {'a': {'b': 1, 'c': 2}}
    """
    if not other:
        return one
    both = dict(one)
    for key, value in other.items():
        both[key] = merged(both[key], value) if key in both else value
    return both


# Typed PRNG keys are stored as their integers.


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_impl(leaf: Any) -> str:
    """Return the name of the implementation of a typed key array or its struct."""
    names: list[str] = []

    def read(keys: jax.Array) -> jax.Array:
        names.append(str(jax.random.key_impl(keys)))
        return jax.random.key_data(keys)

    # A struct has no public access to its implementation; a tracer of it has.
    jax.eval_shape(read, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return names[0]


def to_stored(leaf: jax.Array) -> jax.Array:
    """Return the plain array that is stored for a leaf."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def stored_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding to read the stored array of a target leaf with.

    The integers of a key add one unsharded last dim, so the key's own sharding fits
    them.
    """
    struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if is_key(leaf):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=leaf.sharding)


def from_stored(array: jax.Array, target: Any) -> jax.Array:
    """Turn a stored array back into the leaf that target describes."""
    if not is_key(target):
        return array
    return jax.random.wrap_key_data(array, impl=key_impl(target))
