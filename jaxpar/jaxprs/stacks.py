"""How do loops that no derivative is taken of read and write stacks, slice by slice?"""

from typing import Any

import jax
import jax.numpy as jnp


def empty(shape: tuple[int, ...], dtype: Any, space: Any, number: int) -> jax.Array:
    """A stack to write all slices into, where they are: offloaded ones on the host.

    There stacks differ in what they are filled with. XLA would merge equal ones, and
    copy them apart in the host's memory.
    """
    if space == jax.memory.Space.Device:
        return jnp.zeros(shape, dtype)
    return jax.device_put(jnp.full(shape, number, dtype), space)


def at(stacks: Any, index: Any) -> Any:
    """A slice of every stack."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), stacks
    )


def written(stacks: list, slices: list, index: Any) -> list:
    """Stacks with one slice replaced."""
    return [
        jax.lax.dynamic_update_index_in_dim(stack, part, index, 0)
        for stack, part in zip(stacks, slices, strict=True)
    ]


def data_of(tree: Any) -> tuple[list, tuple]:
    """Arrays, of keys their data; and what `from_data` needs to undo it."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [jax.random.key_impl(x) if _is_key(x) else None for x in leaves]
    pairs = zip(leaves, kinds, strict=True)
    data = [x if kind is None else jax.random.key_data(x) for x, kind in pairs]
    return data, (structure, kinds)


def from_data(data: list, structure: Any, kinds: list) -> Any:
    """Undo `data_of`; of the slices or of their stacks."""
    pairs = zip(data, kinds, strict=True)
    leaves = [
        x if kind is None else jax.random.wrap_key_data(x, impl=kind)
        for x, kind in pairs
    ]
    return jax.tree.unflatten(structure, leaves)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
