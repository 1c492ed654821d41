"""How do rows get from the processes that read them to the devices that need them?"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import TENSOR, rows_spec
from jaxpar.types import Leaf


def place_own(leaf: Leaf, num_rows: int, mesh: Mesh) -> jax.Array:
    """Shard rows over data, with the same number of rows from each process.

    Args:
      leaf: this process's rows, or a `jax.Array` of all rows.
      num_rows: rows of all processes.
      mesh: the mesh.

    Returns:
      A global array, the rows in the processes' order.
    """
    sharding = NamedSharding(mesh, rows_spec(mesh))
    if isinstance(leaf, jax.Array) or jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    rows = np.asarray(leaf)
    shape = (num_rows, *rows.shape[1:])
    start = jax.process_index() * len(rows)
    held = {
        row
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
        for row in range(*index[0].indices(num_rows))
    }
    if held == set(range(start, start + len(rows))):
        return jax.make_array_from_process_local_data(sharding, rows, shape)
    # Some rows belong to other processes than the ones that read them (tensor or pipe
    # spans processes): place them by process, then let XLA move them.
    order = sorted(
        mesh.devices.flat, key=lambda device: (device.process_index, device.id)
    )
    by_process = Mesh(
        np.array(order).reshape(jax.process_count(), -1), ("process", TENSOR)
    )
    own = NamedSharding(by_process, P("process"))
    placed = jax.make_array_from_process_local_data(own, rows, shape)
    return jax.device_put(placed, sharding)


def place_same(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    """Place an array of which every process has a full copy."""
    if isinstance(leaf, jax.Array) or jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)


def agree_on_rows(num_rows: int) -> list[int]:
    """Gather the number of rows of each process; every process must call it."""
    if jax.process_count() == 1:
        return [num_rows]
    return multihost_utils.process_allgather(np.int32(num_rows)).tolist()


def gather_rows(leaf: Leaf, counts: Sequence[int]) -> Leaf:
    """Give every process the rows of all, in process order.

    Args:
      leaf: this process's rows, or a `jax.Array` of all, which is returned as it is.
      counts: rows of each process.

    Returns:
      All rows.
    """
    if isinstance(leaf, jax.Array) or len(counts) == 1:
        return leaf
    # Padded to a power of two: few shapes, so few compiled programs.
    width = 1 << (max(counts) - 1).bit_length()
    padded = np.zeros((width, *leaf.shape[1:]), leaf.dtype)
    padded[: len(leaf)] = leaf
    by_process = multihost_utils.process_allgather(padded)
    return np.concatenate(
        [rows[:count] for rows, count in zip(by_process, counts, strict=True)]
    )
