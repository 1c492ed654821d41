"""Does the host's memory have room for what is offloaded?"""

import re
import resource
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxpar.mesh import are_present


def check_room(bytes_per_device: int, mesh: Mesh, meminfo: Path, cgroup: Path) -> None:
    """Raise if this process's part of the state is larger than what is free.

    Nothing is checked for devices that are not here.

    Args:
      bytes_per_device: what is offloaded of each device's state.
      mesh: the mesh.
      meminfo: the kernel's file of memory, `MEMINFO`.
      cgroup: the folder of this process's limits, `CGROUP`.

    Raises:
      ValueError: if it is larger; the message says by how much.
    """
    if not are_present(mesh):
        return
    own = [x for x in mesh.devices.flat if x.process_index == jax.process_index()]
    needed, free = len(own) * bytes_per_device, free_bytes(meminfo, cgroup)
    if free is not None and needed > free:
        raise ValueError(
            f"offload: {needed / 1e9:,.1f} GB of state ({len(own)} x "
            f"{bytes_per_device / 1e9:,.1f} GB) must fit into this host's memory, of "
            f"which {free / 1e9:,.1f} GB are free{_pinning()}. Lower fraction, shard "
            "the state over more hosts (zero=1 or more), use a smaller optimizer "
            "state, or optimizer='disk'."
        )


def _pinning() -> str:
    """What else bounds pinned memory here: a limit of the process, and its nodes."""
    said, (limit, _) = "", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        said = f"; `ulimit -l` lets a process pin {limit / 1e9:,.3f} GB, unless root"
    nodes = len(list(NODES.glob("node[0-9]*")))
    return said + f"; it has {nodes} NUMA nodes, each with a part" * (nodes > 1)


NODES = Path("/sys/devices/system/node")

_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files of a limit and of what is used, of both versions of control groups."""

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path, cgroup: Path) -> int | None:
    """The bytes that this process may still allocate; None where that is unknown.

    Args:
      meminfo: as Linux has it.
      cgroup: the folder of control groups, whose limit counts too.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M)
    except OSError:
        return None
    free = int(found.group(1)) * 1024 if found else None
    left = (_left(cgroup, *names) for names in _LIMITS)
    known = [number for number in (free, *left) if number is not None]
    return max(0, min(known)) if known else None


def _left(cgroup: Path, limit: str, usage: str) -> int | None:
    """What a limit leaves; None if there is none."""
    try:
        most = (cgroup / limit).read_text().strip()
        used = int((cgroup / usage).read_text())
    except (OSError, ValueError):
        return None
    return int(most) - used if most.isdecimal() else None
