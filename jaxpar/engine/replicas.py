"""Do all devices that hold the same shard of an array hold the same bits?

A device with a compute or memory error corrupts its replica silently, and the next
collective spreads the error. Every device hashes its shards, and hashes of the same
shard are compared. A single flipped bit always changes the hash: it adds a power of
two, times an odd weight, to a sum modulo 2^32.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.sharding.memory_kinds import is_on_host, to_device
from jaxpar.tree import to_stored


class CorruptionError(RuntimeError):
    """Bits that should be equal differ; the message names the leaves and the devices.

    Of replicas, or of a step and its replay on shifted devices.
    """


@dataclasses.dataclass(frozen=True)
class Probe:
    """Hashes leaves on every device, and compares the replicas.

    Attributes:
      mesh: the mesh.
      shardings: leaf name -> sharding, on that mesh.
      hashed: ``(leaves, specs) -> [devices, leaves]``, uint32, replicated; compiled
        once for each list of specs.
    """

    mesh: Mesh
    shardings: Mapping[str, NamedSharding]
    hashed: Callable[..., jax.Array]

    def check(self, leaves: Sequence[jax.Array]) -> None:
        """Hash and compare; waits for the devices.

        Args:
          leaves: in the order of `shardings`.

        Raises:
          CorruptionError: if replicas differ. It names the devices in the minority,
            or both if there are two.
        """
        hashes = self.hashes(leaves)
        devices, wrong = list(self.mesh.devices.flat), []
        for column, (name, leaf) in enumerate(zip(self.shardings, leaves, strict=True)):
            pieces = pieces_of(self.shardings[name], leaf.shape, devices)
            for group in pieces:
                odd = _minority(hashes[group, column])
                wrong += [(name, devices[group[i]]) for i in odd]
        if wrong:
            named = "; ".join(
                f"{name} on {device_name(device)}" for name, device in wrong
            )
            raise CorruptionError(
                f"replicas that should be equal bit by bit differ: {named}. Take the "
                "device out of service, and resume from the last checkpoint."
            )

    def hashes(self, leaves: Sequence[jax.Array]) -> np.ndarray:
        """Hash all leaves of the devices at once, and those of the host one by one.

        The device may have no room for all that the host stores.

        Args:
          leaves: in the order of `shardings`.

        Returns:
          [devices, leaves], uint32: of each device's shard, in the mesh's order.
        """
        places = list(self.shardings.values())
        off = [i for i, place in enumerate(places) if is_on_host(place)]
        on = [i for i in range(len(places)) if i not in off]
        found = np.zeros((self.mesh.size, len(places)), np.uint32)
        for group in [on, *([i] for i in off)]:
            specs = tuple(places[i].spec for i in group)
            found[:, group] = jax.device_get(
                self.hashed([leaves[i] for i in group], specs)
            )
        return found


def make_probe(mesh: Mesh, shardings: Mapping[str, NamedSharding]) -> Probe:
    """Make a probe for leaves of given shardings.

    Args:
      mesh: the mesh.
      shardings: leaf name -> sharding, on that mesh.
    """
    return Probe(mesh, shardings, make_hashed(mesh))


def make_hashed(mesh: Mesh) -> Callable[..., jax.Array]:
    """Make the function that hashes shards: `Probe.hashed`."""
    axes = mesh.axis_names

    def body(leaves: list[jax.Array]) -> jax.Array:
        own = jnp.stack([_hash(leaf) for leaf in leaves])
        return jax.lax.all_gather(own, axes)

    replicated = NamedSharding(mesh, P())

    @functools.partial(jax.jit, static_argnums=1, out_shardings=replicated)
    def hashed(leaves: list[jax.Array], specs: tuple[P, ...]) -> jax.Array:
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(list(specs),), out_specs=P(), check_vma=False
        )
        return mapped([to_stored(leaf) for leaf in to_device(leaves)])

    return hashed


def pieces_of(
    sharding: NamedSharding, shape: tuple[int, ...], devices: Sequence[Any]
) -> list[list[int]]:
    """Positions of devices that hold the same shard, for every replicated shard."""
    held = collections.defaultdict(list)
    indices = sharding.devices_indices_map(shape)
    for position, device in enumerate(devices):
        held[str(indices[device])].append(position)
    return [group for group in held.values() if len(group) > 1]


def _hash(piece: jax.Array) -> jax.Array:
    """Sum the bits of an array, as 32-bit words, by odd weights; uint32."""
    if not piece.size:  # XLA:CPU crashes on an empty sum (jax 0.11.2).
        return jnp.uint32(0)
    words = _words(piece).reshape(-1)
    odd = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * odd, dtype=jnp.uint32)


def _words(piece: jax.Array) -> jax.Array:
    if piece.dtype == jnp.bool_:
        return piece.astype(jnp.uint32)
    if _bits(piece.dtype) < 8:  # Several share a byte.
        is_float = jnp.issubdtype(piece.dtype, jnp.floating)
        piece = piece.astype(jnp.float32 if is_float else jnp.int8)
    size = piece.dtype.itemsize
    if jnp.issubdtype(piece.dtype, jnp.complexfloating):
        return _words(jnp.stack([piece.real, piece.imag]))
    if size >= 4:
        return jax.lax.bitcast_convert_type(piece, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[size]
    return jax.lax.bitcast_convert_type(piece, unsigned).astype(jnp.uint32)


def _bits(dtype: Any) -> int:
    """The bits of an element."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.finfo(dtype).bits
    return jnp.iinfo(dtype).bits


def _minority(hashes: np.ndarray) -> list[int]:
    """Positions whose hash is not the most common one; all if there is a tie."""
    counted = collections.Counter(hashes.tolist()).most_common()
    if len(counted) == 1:
        return []
    is_split = counted[0][1] == counted[1][1]
    return [i for i, h in enumerate(hashes.tolist()) if is_split or h != counted[0][0]]


def device_name(device: Any) -> str:
    """A device by its number, kind and process."""
    return f"device {device.id} ({device.device_kind}, process {device.process_index})"
