"""Which arrays are stored in the host's memory, and how do they get to the device?

A sharding names the memory of its devices that it means: their own, or the host's,
pinned so that the device can copy it.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.types import PyTree

HOST_KINDS = ("pinned_host", "unpinned_host")
"""Memory kinds of a sharding that are the host's."""


def is_on_host(sharding: Any) -> bool:
    """Whether a sharding is in host memory; False for None.

    Compile-only GPUs have no memory kinds in jax 0.11: there it is always False.
    """
    return getattr(sharding, "memory_kind", None) in HOST_KINDS


def has_memory_kinds(mesh: Mesh) -> bool:
    """Whether shardings over a mesh keep memory kinds; not over compile-only GPUs."""
    return bool(mesh.devices.flat[0].addressable_memories())


@dataclasses.dataclass(frozen=True)
class KindAlone:
    """Stands for a sharding where jax keeps no memory kind: it knows that alone.

    Attributes:
      memory_kind: the kind; None for the device's.
    """

    memory_kind: str | None = None

    def with_memory_kind(self, kind: str) -> "KindAlone":
        """As of `jax.sharding.Sharding`."""
        return KindAlone(kind)


def to_device(arrays: PyTree) -> PyTree:
    """In a traced function, copy the arrays that are on the host to the device."""

    def copied(x: jax.Array) -> jax.Array:
        on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if on_host else x

    return jax.tree.map(copied, arrays)


def beside(x: jax.Array, other: jax.Array) -> jax.Array:
    """In a traced function, an array in the memory of another one."""
    return _in_space(x, jax.typeof(other).memory_space)


def to_host(x: jax.Array) -> jax.Array:
    """In a traced function, copy an array to the host."""
    return _in_space(x, jax.memory.Space.Host)


def _in_space(x: jax.Array, space: Any) -> jax.Array:
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def moved_to_device(arrays: PyTree) -> PyTree:
    """Outside of a traced function, copy the arrays that are on the host."""

    places = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), arrays)
    return in_memory_of(arrays, places)


def in_memory_of(arrays: PyTree, shardings: PyTree) -> PyTree:
    """Move the arrays that are in another memory than their shardings say."""

    def moved(x: jax.Array, place: Any) -> jax.Array:
        same = is_on_host(x.sharding) == is_on_host(place)
        return x if same else jax.device_put(x, place)

    return jax.tree.map(moved, arrays, shardings)
