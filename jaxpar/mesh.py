"""How are devices arranged: from a mesh shape to a named `jax.sharding.Mesh`.

A mesh always has three axes: ``data`` (batch rows and ZeRO shards), ``pipe`` (pipeline
stages) and ``tensor`` (shards of a layer). The tensor axis is innermost, because its
collectives are the most frequent: its devices are neighbours on a host.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

DATA, PIPE, TENSOR = "data", "pipe", "tensor"
AXES = (DATA, PIPE, TENSOR)

_COMPILE_ONLY = contextvars.ContextVar("only_planned", default=False)


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
          num_devices: devices to divide among the axes.

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

    @property
    def num_devices(self) -> int | None:
        """The number of devices that the shape needs; None if an axis is -1."""
        sizes = dataclasses.astuple(self)
        return None if -1 in sizes else math.prod(sizes)


def as_mesh(
    mesh: MeshShape | Mesh | None, devices: Sequence[Any] | None = None
) -> Mesh:
    """Return a mesh, or make one from a shape.

    Args:
      mesh: a mesh, a shape, or None for all devices on data.
      devices: the devices to use; None for a mesh's own, or for all.

    Returns:
      The mesh.

    Raises:
      ValueError: if devices are given together with a mesh; otherwise as `make_mesh`.
      TypeError: as `make_mesh`.
    """
    if not isinstance(mesh, Mesh):
        return make_mesh(MeshShape() if mesh is None else mesh, devices)
    if devices is not None:
        raise ValueError(
            f"devices: mesh= is already a mesh of {mesh.size} devices. Pass a "
            "jaxpar.MeshShape with devices=, or the mesh alone."
        )
    return mesh


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices on the axes (data, pipe, tensor).

    Devices of one slice are ordered by `mesh_utils` for locality; several slices
    are split along the data axis, whose traffic is the least frequent. A shape with
    fewer devices than there are uses the first ones, the same number from each process,
    and logs a warning with the logger "jaxpar".

    Args:
      shape: devices by axis; one may be -1.
      devices: the devices to use; None for all of `jax.devices()`.

    Returns:
      A mesh whose three axes are automatic (the compiler inserts collectives).

    Raises:
      ValueError: if the shape needs more devices, a device is named twice, or the
        processes would not own the same number of devices.
      TypeError: if `shape` is not a MeshShape, or `devices` are not devices.
    """
    devices = _listed(jax.devices() if devices is None else devices)
    if not isinstance(shape, MeshShape):
        raise TypeError(
            f"mesh={shape!r} must be a jaxpar.MeshShape, such as "
            "MeshShape(data=4, tensor=2)."
        )
    devices = _taken(shape, devices)
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


def _listed(devices: Any) -> list[Any]:
    """Check what is given as devices."""
    listed = list(devices) if isinstance(devices, Sequence) else []
    if not isinstance(devices, Sequence) or not all(
        hasattr(device, "platform") for device in listed
    ):
        raise TypeError(
            f"devices={devices!r} must be a sequence of JAX devices, such as "
            "jax.devices()[:4]."
        )
    if len(set(listed)) < len(listed):
        raise ValueError(f"devices={devices!r} must name each device once.")
    return listed


def _taken(shape: MeshShape, devices: list[Any]) -> list[Any]:
    """The first devices for a shape, the same number from each process."""
    wanted = min(shape.num_devices or len(devices), len(devices))
    owned: dict[int, list[Any]] = {own: [] for own in range(jax.process_count())}
    for device in devices:
        # In a run of one process, other processes' devices are compile-only.
        owner = device.process_index if len(owned) > 1 else 0
        owned.setdefault(owner, []).append(device)
    each = wanted // len(owned)
    taken = {device for own in owned.values() for device in own[:each]}
    if len(taken) < wanted:
        counts = {owner: len(own) for owner, own in owned.items()}
        raise ValueError(
            f"mesh: {shape} takes {wanted} of {len(devices)} devices, but the "
            f"processes don't own {wanted} in equal shares: devices by process are "
            f"{counts}. Every process passes the same share of a batch. Change the "
            f"shape, or pass devices= with the same number from each process "
            "(device.process_index)."
        )
    if wanted < len(devices) and jax.process_index() == 0:
        _warn_once(
            f"mesh: {shape} uses {wanted} of {len(devices)} devices; an axis of -1 "
            "takes the devices left over, and devices= chooses which to use."
        )
    return [device for device in devices if device in taken]


@functools.cache
def _warn_once(line: str) -> None:
    logging.getLogger("jaxpar").warning(line)


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Treat all devices as compile-only in this context."""
    token = _COMPILE_ONLY.set(True)
    try:
        yield
    finally:
        _COMPILE_ONLY.reset(token)


def are_present(mesh: Mesh) -> bool:
    """Whether the mesh's devices can run programs, and are not compile-only."""
    if _COMPILE_ONLY.get():
        return False
    device = mesh.devices.flat[0]
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:  # There is no such backend.
        return False


def lowering_platform(mesh: Mesh) -> str:
    """The platform name of the mesh's devices for `jax.jit`'s lowering."""
    platform = mesh.devices.flat[0].platform
    return "cuda" if platform == "gpu" else platform


def on_abstract_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """Trace on the mesh's abstract mesh: its axes without devices."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
