"""How are the leaves of the state that are not on disk written beside those that are?

As the bytes of this process's shards: they are read by the same process on the same
mesh, and a checkpoint is for all else.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpar import tree
from jaxpar.offload.on_disk import is_on_disk
from jaxpar.types import PyTree


def bytes_of_leaves(state: PyTree) -> dict[str, np.ndarray]:
    """This process's bytes of a tree's leaves.

    Args:
      state: arrays.

    Returns:
      "name@i", for the i-th distinct shard here -> its bytes, uint8. A shard that
      several devices have is there once.
    """
    found = {}
    for name, leaf in tree.named_leaves(state).items():
        for number, piece in enumerate(by_index(tree.to_stored(leaf)).values()):
            data = np.ascontiguousarray(piece[0].data)
            found[f"{name}@{number}"] = data.reshape(-1).view(np.uint8)
    return found


def leaves_from_bytes(structs: PyTree, stored: Mapping[str, np.ndarray]) -> PyTree:
    """The tree whose bytes `bytes_of_leaves` returned.

    Args:
      structs: shapes, dtypes and shardings.
      stored: the bytes.

    Raises:
      ValueError: if a leaf is missing or has another size.
    """
    leaves = {
        name: _array(name, struct, stored)
        for name, struct in tree.named_leaves(structs).items()
    }
    return jax.tree.unflatten(jax.tree.structure(structs), leaves.values())


def described(state: PyTree) -> dict[str, Any]:
    """Which leaves a tree has, as JSON: two runs must agree to share their bytes.

    Args:
      state: arrays or their shapes, with shardings.

    Returns:
      Name -> shape, dtype and this process's parts; of a leaf on disk its name alone.
    """
    found: dict[str, Any] = {}
    for name, leaf in tree.named_leaves(state, is_leaf=is_on_disk).items():
        found[name] = "on disk"
        if not is_on_disk(leaf):
            indices = list(indices_of(leaf.sharding, tuple(leaf.shape)))
            found[name] = [list(leaf.shape), str(leaf.dtype), indices]
    return found


def by_index(array: jax.Array) -> dict[str, list[Any]]:
    """An array's shards of this process's devices, by the part that they have."""
    found: dict[str, list[Any]] = {}
    for shard in array.addressable_shards:
        found.setdefault(str(shard.index), []).append(shard)
    return found


def indices_of(place: Sharding, shape: tuple[int, ...]) -> dict[str, list[Any]]:
    """The parts of an array that this process has -> its devices that have them."""
    found: dict[str, list[Any]] = {}
    for device, index in place.addressable_devices_indices_map(shape).items():
        found.setdefault(str(index), []).append(device)
    return found


def placed_on(
    place: Sharding, shape: tuple[int, ...], pieces: Mapping[str, np.ndarray]
) -> jax.Array:
    """An array of the parts that this process has.

    Args:
      place: its sharding.
      shape: its shape.
      pieces: by index, as `by_index` names them.
    """
    arrays = [
        jax.device_put(
            pieces[index], SingleDeviceSharding(device, memory_kind=place.memory_kind)
        )
        for index, devices in indices_of(place, shape).items()
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(shape, place, arrays)


def _array(name: str, struct: Any, stored: Mapping[str, np.ndarray]) -> jax.Array:
    plain = tree.stored_struct(struct)
    place, shape = plain.sharding, plain.shape
    assert place is not None, "stored state has shardings"
    own, pieces = place.shard_shape(shape), {}
    needed = math.prod(own) * plain.dtype.itemsize
    for number, index in enumerate(indices_of(place, shape)):
        data = stored.get(f"{name}@{number}", np.empty(0, np.uint8))
        if data.size != needed:
            raise ValueError(
                f"offload: path: the state there has {data.size} bytes of {name}, but "
                f"{needed} are needed: it is of another run. Restore a checkpoint, and "
                "give another path."
            )
        pieces[index] = data.view(plain.dtype).reshape(own)
    return tree.from_stored(placed_on(place, shape, pieces), struct)
