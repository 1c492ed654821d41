"""Which devices does a run on this one machine get, where only a CPU may be present?"""

import math

import jax
from jax.sharding import Mesh

from jaxpar.mesh import MeshShape, make_mesh


def choose_mesh(shape: MeshShape, *, on_cpu: MeshShape) -> Mesh:
    """Make a mesh of this machine's devices; where it has only a CPU, of CPU devices.

    Call it before anything asks jax for its devices: their number is then fixed.

    Args:
      shape: devices by axis; the default for all accelerators on data, or `on_cpu`.
      on_cpu: the mesh to use where only a CPU is present and `shape` is the default.

    Returns:
      The mesh.

    Raises:
      ValueError: if the shape does not match the devices.
    """
    wanted = on_cpu if shape == MeshShape() else shape
    sizes = (wanted.data, wanted.pipe, wanted.tensor)
    num_devices = math.prod(size for size in sizes if size != -1)
    _make_cpu_devices(num_devices)
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return make_mesh(shape, devices)
    if -1 not in sizes:
        devices = devices[:num_devices]
    return make_mesh(wanted, devices)


def _make_cpu_devices(num_devices: int) -> None:
    """Ask for CPU devices; accelerators are what they are."""
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        # Some devices exist already, as in a notebook's second call: the mesh is then
        # checked against those.
        return
