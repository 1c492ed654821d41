"""How are devices arranged: from a mesh shape to a named `jax.sharding.Mesh`.

Each axis has a role. Batch axes split the rows: ``data`` (and, by ZeRO, the state),
``replica`` (the rows only: each replica stores the state) and ``expert`` (as data, and
experts too). ``pipe`` has pipeline stages, ``tensor`` shards of a layer. The axes whose
collectives are the most frequent are innermost: their devices are neighbours on a host.
A mesh always has data, pipe and tensor; the others where they have two devices or more.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

REPLICA, DATA, EXPERT = "replica", "data", "expert"
PIPE, TENSOR = "pipe", "tensor"

AXES = (REPLICA, DATA, EXPERT, PIPE, TENSOR)
"""All axes that a mesh may have, outermost first."""

BATCH_AXES = (REPLICA, DATA, EXPERT)
"""The axes that split the rows of a batch."""

ZERO_AXES = (DATA, EXPERT)
"""The axes over which ZeRO shards the state."""

_ALWAYS = (DATA, PIPE, TENSOR)

_COMPILE_ONLY = contextvars.ContextVar("only_planned", default=False)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices each mesh axis has.

    Attributes:
      data: ways the batch (and, by ZeRO, the state) is split; -1 for the devices left
        over.
      pipe: pipeline stages; -1 likewise.
      tensor: ways a layer is split; -1 likewise.
      replica: copies of the state, which split the batch as well (hybrid sharding):
        parameters are gathered inside a replica, and gradients summed over all.
      expert: ways the experts of a mixture are split; the batch and the other
        parameters are split over data and expert.

    Raises:
      ValueError: if an axis is neither positive nor -1, or two are -1.

    Example:
      >>> MeshShape(tensor=2).resolve(8)
      MeshShape(data=4, pipe=1, tensor=2)
    """

    data: int = -1
    pipe: int = 1
    tensor: int = 1
    replica: int = 1
    expert: int = 1

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
        fixed = self.num_fixed
        open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
        if open_axis and num_devices % fixed == 0 and num_devices >= fixed:
            return dataclasses.replace(self, **{open_axis: num_devices // fixed})
        if fixed != num_devices or open_axis:
            raise ValueError(
                f"mesh: {self} needs "
                + (f"a multiple of {fixed}" if open_axis else f"{fixed}")
                + f" devices, but there are {num_devices}. Change the shape (one axis "
                "may be -1), or pass devices=jax.devices()[:n] to use only some."
            )
        return self

    @property
    def num_fixed(self) -> int:
        """Devices on the axes that are not -1."""
        return math.prod(size for size in dataclasses.astuple(self) if size != -1)

    @property
    def num_devices(self) -> int | None:
        """The number of devices that the shape needs; None if an axis is -1."""
        return None if -1 in dataclasses.astuple(self) else self.num_fixed

    @property
    def axes(self) -> dict[str, int]:
        """Axis of the mesh -> devices on it, outermost first."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        return {a: size for a, size in sizes.items() if a in _ALWAYS or size != 1}

    def __str__(self) -> str:
        named = dataclasses.asdict(self).items()
        shown = [f"{a}={size}" for a, size in named if a in _ALWAYS or size != 1]
        return f"MeshShape({', '.join(shown)})"

    __repr__ = __str__


def axes_text(sizes: Mapping[str, int]) -> str:
    """Axes and their sizes as people write them.

    Example:
      >>> axes_text({"data": 4, "tensor": 2})
      'data 4 x tensor 2'
    """
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The mesh's axes that split the rows of a batch."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)


def num_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """In how many shards the rows of a batch are."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def rows_spec(mesh: Mesh | AbstractMesh) -> P:
    """The spec of an array whose dim 0 is the rows of a batch."""
    return P(entry_of(batch_axes(mesh)))


def entry_of(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """One entry of a spec, from the axes that split a dim."""
    return tuple(axes) if len(axes) > 1 else next(iter(axes), None)


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
    _refuse_devices(mesh, devices)
    known = tuple(axis for axis in AXES if axis in mesh.axis_names)
    named = set(_ALWAYS) <= set(known) and known == mesh.axis_names
    if not named or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"mesh: its axes are {mesh.axis_names} of types {mesh.axis_types}, but "
            f"must be {_ALWAYS}, or {AXES}, in this order, all automatic. Pass a "
            "jaxpar.MeshShape, or say which role each axis has: jaxpar.make_mesh(mesh, "
            "roles={'x': 'data', 'y': 'tensor'})."
        )
    return mesh


def make_mesh(
    shape: MeshShape | Mesh,
    devices: Sequence[Any] | None = None,
    *,
    roles: Mapping[str, str] | None = None,
) -> Mesh:
    """Arrange devices on the axes of a shape, or another mesh's on jaxpar's axes.

    Devices of one slice are ordered by `mesh_utils` for locality; several slices
    are split along the replica axis, or else the data axis, whose traffic is the least
    frequent. A shape with fewer devices than there are uses the first ones, the same
    number from each process, and logs a warning with the logger "jaxpar".

    Args:
      shape: devices by axis; one may be -1. Or a mesh of any axes, with `roles`.
      devices: the devices to use; None for all of `jax.devices()`, or the mesh's own.
      roles: axis of the mesh given -> "data", "replica", "expert", "pipe" or "tensor".
        Axes of one role (the dims of a TPU slice's torus) become one axis, the first
        outermost: collectives over it run in the groups of those axes together.

    Returns:
      A mesh whose axes are automatic (the compiler inserts collectives).

    Raises:
      ValueError: if the shape needs more devices, a device is named twice, the
        processes would not own the same number of devices, or an axis has no role.
      TypeError: if `shape` is not a MeshShape, or `devices` are not devices.

    Example:
      >>> mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"))
      >>> roles = {"x": "data", "y": "tensor", "z": "tensor"}
      >>> dict(make_mesh(mesh, roles=roles).shape)
      {'data': 2, 'pipe': 1, 'tensor': 4}
    """
    if isinstance(shape, Mesh):
        _refuse_devices(shape, devices)
        return _with_roles(shape, roles or {})
    if roles is not None:
        raise ValueError(f"roles={dict(roles)} are for a mesh; {shape!r} has its own.")
    devices = _listed(jax.devices() if devices is None else devices)
    if not isinstance(shape, MeshShape):
        raise TypeError(
            f"mesh={shape!r} must be a jaxpar.MeshShape, such as "
            "MeshShape(data=4, tensor=2)."
        )
    devices = _taken(shape, devices)
    shape = shape.resolve(len(devices))
    names, sizes = zip(*shape.axes.items(), strict=True)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    outer = [axis for axis in (REPLICA, DATA) if getattr(shape, axis) % num_slices == 0]
    if num_slices > 1 and outer:
        over = [num_slices if axis == outer[0] else 1 for axis in names]
        inner = [size // by for size, by in zip(sizes, over, strict=True)]
        grid = mesh_utils.create_hybrid_device_mesh(inner, over, devices)
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(sizes, devices)
    else:
        grid = np.array(devices).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _refuse_devices(mesh: Mesh, devices: Sequence[Any] | None) -> None:
    if devices is not None:
        raise ValueError(
            f"devices: mesh= is already a mesh of {mesh.size} devices. Pass a "
            "jaxpar.MeshShape with devices=, or the mesh alone."
        )


def _with_roles(mesh: Mesh, roles: Mapping[str, str]) -> Mesh:
    """Arrange a mesh of other axes on jaxpar's axes."""
    if set(roles) != set(mesh.axis_names) or not set(roles.values()) <= set(AXES):
        raise ValueError(
            f"roles={dict(roles)} must give each axis of the mesh, "
            f"{mesh.axis_names}, one of the roles {', '.join(AXES)}."
        )
    order = [
        [at for at, axis in enumerate(mesh.axis_names) if roles[axis] == role]
        for role in AXES
    ]
    sizes = [math.prod(mesh.devices.shape[at] for at in own) for own in order]
    kept = [(a, n) for a, n in zip(AXES, sizes, strict=True) if a in _ALWAYS or n > 1]
    names, shape = zip(*kept, strict=True)
    grid = mesh.devices.transpose([at for own in order for at in own]).reshape(shape)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


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


def cpu_twin(mesh: Mesh) -> Mesh:
    """The same mesh of CPU devices: a process has as many as of the mesh's own.

    Returns:
      The mesh itself if it is of CPUs, or its devices are not here.

    Raises:
      ValueError: if a process has fewer CPU devices than others of the mesh.
    """
    own = _platform(mesh)
    if own == "cpu" or not are_present(mesh):
        return mesh
    cpus, others = (_by_process(jax.devices(name)) for name in ("cpu", own))
    for process, devices in others.items():
        if len(cpus.get(process, [])) < len(devices):
            raise ValueError(
                f"mesh: process {process} has {len(devices)} {own} devices and "
                f"{len(cpus.get(process, []))} CPU devices, but needs one of these for "
                f"each: set JAX_NUM_CPU_DEVICES={len(devices)}, or start one process "
                "for each device."
            )
    twin = {
        device: cpus[process][number]
        for process, devices in others.items()
        for number, device in enumerate(devices)
    }
    devices = np.vectorize(twin.get, otypes=[object])(mesh.devices)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def _by_process(devices: Sequence[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for device in devices:
        found.setdefault(device.process_index, []).append(device)
    return found


def lowering_platform(mesh: Mesh) -> str:
    """The platform name of the mesh's devices for `jax.jit`'s lowering."""
    platform = _platform(mesh)
    return "cuda" if platform == "gpu" else platform


def on_abstract_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """Trace on the mesh's abstract mesh: its axes without devices."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
