"""How does a state get to the same mesh with its devices shifted by some places?

There each logical shard is another device's. Shards go from device to device, also
between processes; no array is gathered.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.sharding.memory_kinds import is_on_host, to_device
from jaxpar.tree import from_stored, to_stored


def shifted_mesh(mesh: Mesh, by: int) -> Mesh:
    """A mesh of the same axes, whose devices are those of some places before.

    Args:
      mesh: the mesh.
      by: places, in the order of ``mesh.devices.flat``, around its end.

    Example:
      >>> mesh = jax.make_mesh((4, 2), ("data", "tensor"))
      >>> [device.id for device in shifted_mesh(mesh, 1).devices.flat]
      [7, 0, 1, 2, 3, 4, 5, 6]
    """
    devices = np.roll(mesh.devices.reshape(-1), by).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def moved(arrays: Sequence[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """Copy arrays to a mesh of the same devices in another order; wait for the copies.

    Gloo confuses the collectives of two programs that run at once.

    Args:
      arrays: sharded by `NamedSharding`s over one mesh; of several processes all call
        it. Nothing is donated.
      mesh: of the same devices and axes.

    Returns:
      Arrays of the same values and specs, on that mesh, with memory of their own.
    """
    on_device = [
        i for i, x in enumerate(arrays) if x.size and not is_on_host(x.sharding)
    ]
    found = dict(
        zip(on_device, _sent([arrays[i] for i in on_device], mesh), strict=True)
    )
    return [
        found[i] if i in found else _sent([x], mesh)[0] if x.size else _empty(x, mesh)
        for i, x in enumerate(arrays)
    ]


def _empty(x: jax.Array, mesh: Mesh) -> jax.Array:
    """An array without elements; XLA:CPU sends none."""
    zeros = functools.partial(jnp.zeros, x.shape, x.dtype)
    return jax.jit(zeros, out_shardings=_on_mesh(x.sharding, mesh))()


def _on_mesh(sharding: Any, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _sent(arrays: Sequence[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """Send each device's shards to the device that has its place in the mesh.

    Those in host memory pass through the device's.
    """
    if not arrays:
        return []
    plain: list[Any] = [to_stored(x) for x in arrays]
    places = tuple(_on_mesh(x.sharding, x.sharding.mesh) for x in plain)
    sent = jax.block_until_ready(_sender(mesh, places)(plain))
    return [
        from_stored(
            jax.make_array_from_single_device_arrays(
                x.shape, _on_mesh(place, mesh), [s.data for s in x.addressable_shards]
            ),
            like,
        )
        for x, place, like in zip(sent, places, arrays, strict=True)
    ]


@functools.cache
def _sender(after: Mesh, places: tuple[NamedSharding, ...]) -> jax.stages.Wrapped:
    """A program after which each device has what it stores on another mesh."""
    before: Any = places[0].mesh
    at = {device: place for place, device in enumerate(before.devices.flat)}
    pairs = [(place, at[device]) for place, device in enumerate(after.devices.flat)]
    specs = [place.spec for place in places]

    def send(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.ppermute(x, before.axis_names, pairs) for x in arrays]

    mapped = jax.shard_map(
        send, mesh=before, in_specs=(specs,), out_specs=specs, check_vma=False
    )
    return jax.jit(lambda arrays: mapped(to_device(arrays)), out_shardings=list(places))
