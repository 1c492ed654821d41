"""Does a disk have room for what is offloaded, and is it one?"""

import shutil
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxpar.mesh import are_present

MOUNTS = Path("/proc/self/mounts")

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check_disk(
    bytes_per_device: int, mesh: Mesh, path: Path, mounts: Path = MOUNTS
) -> None:
    """Raise if a folder can't hold this process's part of the state.

    Nothing is checked for devices that are not here.

    Args:
      bytes_per_device: that each device's state takes, in all of its versions.
      mesh: the mesh.
      path: the folder, which is made.
      mounts: the kernel's list of file systems.

    Raises:
      ValueError: if it can't be made, is in memory, or has no room; the message says
        how much is needed.
    """
    if not are_present(mesh):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"offload: path={str(path)!r} can't be made: {error.strerror}. Give a "
            "folder on a local disk that this user may write."
        ) from error
    kind = file_system(path, mounts)
    if kind in _IN_MEMORY:
        raise ValueError(
            f"offload: path={str(path)!r} is on {kind}, which is memory; give a folder "
            "on a disk, or optimizer='host'."
        )
    own = [x for x in mesh.devices.flat if x.process_index == jax.process_index()]
    needed, used = len(own) * bytes_per_device, _bytes_in(path)
    free = shutil.disk_usage(path).free + used
    if needed > free:
        raise ValueError(
            f"offload: path={str(path)!r} needs {needed / 1e9:,.1f} GB for the "
            f"versions of the state, of which {free / 1e9:,.1f} GB are free. Give "
            "another disk, lower fraction, or shard the state over more hosts "
            "(zero=1 or more)."
        )


def file_system(path: Path, mounts: Path) -> str | None:
    """The kind of the file system that a folder is on; None where that is unknown."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    whole, best = path.resolve(), (0, None)
    for line in lines:
        _, point, kind, *_ = line.split()
        place = Path(point.replace("\\040", " "))
        if whole.is_relative_to(place):
            best = max(best, (len(place.parts), kind), key=lambda found: found[0])
    return best[1]


def _bytes_in(path: Path) -> int:
    """What this process's earlier state takes there, which is overwritten."""
    own = path / f"process-{jax.process_index()}"
    return sum(file.stat().st_size for file in own.rglob("*.bin"))
