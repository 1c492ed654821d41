"""What is this machine, and what can be planned on it: the facts for a bug report."""

import importlib.metadata
import os
import platform
from pathlib import Path

import jax

from jaxpar.compiled.hardware import kinds, load_hardware
from jaxpar.launch.extras import pip_install
from jaxpar.offload.disk_speed import measure_disk
from jaxpar.planner.absent_devices import has_gpu_compiler, has_tpu_compiler

_PACKAGES = (
    "jaxpar", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy",
    "jax-cuda13-plugin", "libtpu",
)  # fmt: skip


def describe(disk: Path | None = None) -> dict[str, str]:
    """Versions, devices, memory, and what planning can target.

    Args:
      disk: a folder whose disk is measured.

    Returns:
      Name -> value, for people.
    """
    found = {"python": platform.python_version(), "machine": platform.platform()}
    found |= {name: _version(name) for name in _PACKAGES}
    found["cpu cores"] = str(os.cpu_count())
    found["host memory"] = _gigabytes(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    devices = jax.devices()
    found["devices"] = f"{len(devices)} x {devices[0].device_kind}"
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        found["device memory"] = _gigabytes(stats["bytes_limit"])
    for name, platform_name, there, extra in (
        ("plans for GPUs", "cuda", has_gpu_compiler(), "plan-gpu"),
        ("plans for TPUs", "tpu", has_tpu_compiler(), "plan-tpu"),
    ):
        kind = [k for k in kinds() if load_hardware(k).platform == platform_name]
        method = ", ".join(kind)
        remedy = f"{method} with XLA:CPU's program; {pip_install(extra)}"
        found[name] = method if there else remedy
    if disk is not None:
        found[f"disk of {disk}"] = str(measure_disk(disk))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB"
