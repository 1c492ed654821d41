"""Is an update of what is on the host faster on the device, or by the host itself?

Both are measured where the run is: the link with all devices of this process at once,
and the host's pass over a leaf of the run's own optimizer.
"""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import SingleDeviceSharding

from jaxpar.jaxprs.evaluate import shape_of
from jaxpar.mesh import are_present
from jaxpar.offload.cpu_update import CpuUpdate

_ELEMENTS = 1 << 22
"""Of the arrays that are measured with."""


@dataclasses.dataclass(frozen=True)
class UpdateTimes:
    """Estimated seconds that the update of a step takes, by where it is computed.

    Attributes:
      device: while the state passes through the device.
      host: while the host works, with gradients down and parameters up.
    """

    device: float
    host: float

    @property
    def faster(self) -> str:
        """The value of `Offload.update` for the faster one."""
        return "host" if self.host < self.device else "device"

    def __str__(self) -> str:
        other = "the device" if self.faster == "host" else "the host"
        best, worse = sorted((self.host, self.device))
        return (
            f"offload: update='auto' is {self.faster!r}: {1e3 * best:,.1f} ms a step, "
            f"and {1e3 * worse:,.1f} by {other}, as measured."
        )


def measure_update(update: CpuUpdate) -> UpdateTimes:
    """Estimate an update both ways, from what is measured on this machine.

    Processes agree on the slowest of each.

    Raises:
      ValueError: if the devices are not here.
    """
    mesh = update.spec.mesh
    if not are_present(mesh):
        raise ValueError(
            "offload: update='auto' measures the devices, which are not here; plan "
            "update='device' and update='host', and compare."
        )
    devices = [x for x in mesh.devices.flat if x.process_index == jax.process_index()]
    if not update.parts:
        return UpdateTimes(0.0, 0.0)
    link = _link_rate(devices)
    streamed = sum(leaf.num_bytes for leaf in update.host_leaves.values())
    # A gradient goes down, and the parameter up, in the compute dtype.
    width = jnp.dtype(update.spec.compute_dtype).itemsize
    shapes = jax.tree.leaves(update.spec.params)
    elements = [
        math.prod(shapes[leaf.param].shape)
        // update.spec.leaf_shardings[leaf.param].ways_stored
        for leaf in update.host_leaves.values()
    ]
    if jnp.float32 == update.spec.compute_dtype:  # Masters are read once more.
        streamed += width * sum(elements)
    passed = len(devices) * update.traffic().memory / _pass_rate(update)
    # All devices' state is updated by the same cores.
    own = np.array([streamed / link, 2 * width * sum(elements) / link + passed])
    device, host = np.atleast_2d(process_allgather(own)).max(0).tolist()
    return UpdateTimes(device, host)


def _link_rate(devices: list) -> float:
    """Bytes per second and direction, while all devices copy both ways."""
    kinds = "pinned_host", "device"
    data = np.zeros(_ELEMENTS, np.float32)
    there, here = (
        [
            jax.device_put(data, SingleDeviceSharding(x, memory_kind=kind))
            for x in devices
        ]
        for kind in kinds
    )
    places = [
        SingleDeviceSharding(x, memory_kind=kind)
        for kind in reversed(kinds)
        for x in devices
    ]

    def both() -> None:
        jax.block_until_ready(jax.device_put([*there, *here], places))

    return data.nbytes / _seconds(both)


def _pass_rate(update: CpuUpdate) -> float:
    """Bytes per second that the host's pass over a leaf moves."""
    part = update.parts[0]
    run, _ = update.pass_of(part)
    arrays = [np.ones(_ELEMENTS, shape_of(var).dtype) for var in part.inputs]
    outs = arrays[: len(part.group.ins)]
    if update.makes_copy(part.group.name):
        outs = [*outs, np.ones(_ELEMENTS, update.spec.compute_dtype)]
    scalars = [np.ones((), shape_of(var).dtype) for var in part.scalars]
    moved = sum(array.nbytes for array in [*arrays, *outs])
    return moved / _seconds(lambda: run([*arrays, *outs], scalars))


def _seconds(function: Callable[[], None], turns: int = 5) -> float:
    """The least of some turns, after one that counts for nothing."""
    function()
    taken = []
    for _ in range(turns):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return min(taken)
