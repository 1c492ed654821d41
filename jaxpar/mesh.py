"""Which device stands where: a mesh shape becomes a named `jax.sharding.Mesh`.

Three axes, always all three: ``data`` (batch rows and ZeRO shards), ``pipe``
(pipeline stages) and ``tensor`` (pieces of a layer). The tensor axis is innermost,
for its collectives are the most frequent: neighbours in it are neighbours in a host.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

DATA, PIPE, TENSOR = "data", "pipe", "tensor"
AXES = (DATA, PIPE, TENSOR)

_ONLY_PLANNED = contextvars.ContextVar("only_planned", default=False)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices each mesh axis has.

    Attributes:
      data: ways the batch (and, by ZeRO, the state) is split; -1 for the devices left
        over.
      pipe: pipeline stages; -1 likewise.
      tensor: ways a layer is split; -1 likewise.

    Raises:
      ValueError: if an axis is neither positive nor -1, or two are -1.

    Example:
      >>> MeshShape(tensor=2).resolve(8)
      MeshShape(data=4, pipe=1, tensor=2)
    """

    data: int = -1
    pipe: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if not isinstance(size, int) or (size < 1 and size != -1):
                raise ValueError(
                    f"mesh: MeshShape({axis}={size}) must be a positive number of "
                    "devices, or -1 for the devices left over."
                )
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise ValueError(
                f"mesh: {' and '.join(open_axes)} are both -1; only one axis can take "
                "the devices left over. Give the others a number."
            )

    def resolve(self, num_devices: int) -> "MeshShape":
        """Fill in the axis given as -1.

        Args:
          num_devices: devices to spread over the axes.

        Returns:
          A shape whose product is `num_devices`.

        Raises:
          ValueError: if no such shape exists.
        """
        sizes = dataclasses.asdict(self)
        fixed = math.prod(size for size in sizes.values() if size != -1)
        open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
        if open_axis and num_devices % fixed == 0 and num_devices >= fixed:
            return dataclasses.replace(self, **{open_axis: num_devices // fixed})
        if fixed != num_devices or open_axis:
            raise ValueError(
                f"mesh: MeshShape(data={self.data}, pipe={self.pipe}, "
                f"tensor={self.tensor}) needs "
                + (f"a multiple of {fixed}" if open_axis else f"{fixed}")
                + f" devices, but there are {num_devices}. Change the shape (one axis "
                "may be -1), or pass devices=jax.devices()[:n] to use only some."
            )
        return self


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Lay devices out on the axes (data, pipe, tensor).

    Devices of one slice are ordered by `mesh_utils` for locality; several slices
    are split along the data axis, whose traffic is the least frequent.

    Args:
      shape: devices by axis; one may be -1.
      devices: the devices to use; None for all of `jax.devices()`.

    Returns:
      A mesh whose three axes are automatic (the compiler places what is not manual).

    Raises:
      ValueError: if the shape does not match the devices.
      TypeError: if `shape` is not a MeshShape.
    """
    devices = list(jax.devices() if devices is None else devices)
    if not isinstance(shape, MeshShape):
        raise TypeError(
            f"mesh={shape!r} must be a jaxpar.MeshShape, such as "
            "MeshShape(data=4, tensor=2)."
        )
    shape = shape.resolve(len(devices))
    sizes = (shape.data, shape.pipe, shape.tensor)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices > 1 and shape.data % num_slices == 0:
        grid = mesh_utils.create_hybrid_device_mesh(
            (shape.data // num_slices, shape.pipe, shape.tensor),
            (num_slices, 1, 1),
            devices,
        )
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(sizes, devices)
    else:
        grid = np.array(devices).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@contextlib.contextmanager
def only_planned() -> Iterator[None]:
    """Inside, devices that are here count as ones to compile for, never to run on."""
    token = _ONLY_PLANNED.set(True)
    try:
        yield
    finally:
        _ONLY_PLANNED.reset(token)


def are_present(mesh: Mesh) -> bool:
    """Whether the mesh's devices can run programs, and are not just to compile for."""
    if _ONLY_PLANNED.get():
        return False
    device = mesh.devices.flat[0]
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:  # No backend of that name was started.
        return False


def lowering_platform(mesh: Mesh) -> str:
    """The name by which `jax.jit`'s lowering knows the mesh's devices."""
    platform = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform
