"""Which devices does a run get, on CPU only, or with another number of workers?"""

import dataclasses
import socket
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.launch.agreement import exchange
from jaxpar.launch.worker_environment import Worker, current
from jaxpar.mesh import MeshShape, make_mesh


def choose_mesh(shape: MeshShape, *, on_cpu: MeshShape) -> Mesh:
    """Make a mesh of the run's devices; with only a CPU, of CPU devices.

    Call it before anything asks jax for its devices, because that fixes their number.
    If a run resumes with fewer or more workers than at its first launch, the data axis
    is scaled in proportion; see `scaled_accumulation`.

    Args:
      shape: devices by axis; the default for all accelerators on data, or `on_cpu`.
      on_cpu: the mesh to use where only a CPU is present and `shape` is the default.

    Returns:
      The mesh, over the devices of all workers.

    Raises:
      ValueError: if the shape does not match the devices, or the workers.
    """
    worker = current()
    wanted = on_cpu if shape == MeshShape() else shape
    if worker is not None:
        wanted, shape = (_for_workers(each, worker) for each in (wanted, shape))
    _make_cpu_devices(_each_worker(wanted.num_fixed, worker))
    devices = jax.devices()
    if devices[0].platform != "cpu":
        wanted = shape
    _require_devices(wanted, len(devices))
    return make_mesh(wanted, devices)


def choose_meshes(
    shape: MeshShape, steps: int, *, on_cpu: MeshShape
) -> list[tuple[Mesh, int]]:
    """Choose the meshes of a run that shows, on a CPU, that it can change its mesh.

    Args:
      shape: devices by axis, as for `choose_mesh`.
      steps: of the run.
      on_cpu: the mesh to begin with where only a CPU is present and `shape` is the
        default. The last quarter is on as many devices on data.

    Returns:
      The meshes, and the step that each trains to; elsewhere the one of `choose_mesh`.
    """
    mesh = choose_mesh(shape, on_cpu=on_cpu)
    if mesh.devices.flat[0].platform == "cpu" and shape == MeshShape():
        return [(mesh, steps * 3 // 4), (make_mesh(MeshShape()), steps)]
    return [(mesh, steps)]


def cpu_devices(number: int) -> list[Any]:
    """Make CPU devices, to try a mesh on a machine without accelerators.

    Call it before anything asks jax for its devices, because that fixes their number.

    Args:
      number: how many.

    Returns:
      The first `number` CPU devices of this process.

    Raises:
      ValueError: if it is not an integer of at least 1, or jax has started with fewer.

    Example:
      >>> len(cpu_devices(4))
      4
    """
    if not isinstance(number, int) or number < 1:
        raise ValueError(
            f"cpu_devices: number={number!r} must be an integer of at least 1."
        )
    _make_cpu_devices(number)
    devices = jax.local_devices(backend="cpu")
    if len(devices) < number:
        raise ValueError(
            f"cpu_devices: number={number}, but jax has started with {len(devices)} "
            "CPU devices, and keeps that number. Call cpu_devices in a new process, "
            "before anything asks jax for devices (arrays, jax.devices(), a mesh)."
        )
    return devices[:number]


def scaled_accumulation(accumulate: int) -> int:
    """Micro-batches per step that preserve the global batch with fewer or more workers.

    Args:
      accumulate: micro-batches with the workers of the first launch.

    Returns:
      Micro-batches with the current workers; rows per device do not increase.

    Raises:
      ValueError: if the current workers can't split them.
    """
    worker = current()
    if worker is None or worker.processes == worker.planned:
        return accumulate
    scaled, rest = divmod(accumulate * worker.planned, worker.processes)
    if rest == 0:
        return scaled
    if worker.processes > worker.planned:
        return accumulate
    raise ValueError(
        f"accumulate={accumulate} with {worker.planned} workers is not a whole "
        f"number with {worker.processes}: start with a divisor of {worker.planned}"
    )


def _for_workers(shape: MeshShape, worker: Worker) -> MeshShape:
    if worker.processes == worker.planned or shape.data == -1:
        return shape
    data, rest = divmod(shape.data * worker.processes, worker.planned)
    if rest:
        raise ValueError(
            f"mesh: data={shape.data} of {worker.planned} workers can't resume with "
            f"{worker.processes}: the axis would have {shape.data}·"
            f"{worker.processes}/{worker.planned} devices. Start a number of "
            "workers for which that is a whole number"
        )
    return dataclasses.replace(shape, data=data)


def _each_worker(num_devices: int, worker: Worker | None) -> int:
    """CPU devices to make in this process."""
    if worker is None:
        return num_devices
    if worker.local_devices is not None:
        return worker.local_devices
    each, rest = divmod(num_devices, worker.processes)
    if rest:
        raise ValueError(
            f"mesh: {num_devices} devices can't be divided among "
            f"{worker.processes} workers: choose a mesh of a multiple, or set the "
            "number of each (--local-devices)"
        )
    return each


def _require_devices(shape: MeshShape, found: int) -> None:
    """Report which worker has too few devices; one process gets the mesh's error."""
    needed = shape.num_fixed
    if jax.process_count() == 1 or found >= needed:
        return
    mine = [socket.gethostname(), jax.local_device_count()]
    reports = exchange("devices", mine)
    most = max(count for _, count in reports)
    fewer = [
        f"worker {index} ({host}) has {count}"
        for index, (host, count) in enumerate(reports)
        if count < most
    ]
    lacking = f"; {', '.join(fewer)}, the others {most}" if fewer else ""
    raise ValueError(
        f"mesh: {shape} needs {needed} devices, but {len(reports)} workers have "
        f"{found}{lacking}: choose a smaller mesh, or start more workers"
    )


def _make_cpu_devices(num_devices: int) -> None:
    """Request CPU devices; the number of accelerators is fixed."""
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        # Some devices exist already, as in a notebook's second call: the mesh is then
        # checked against them.
        return
