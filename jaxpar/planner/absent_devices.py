"""How are absent devices made: to compile for, never to run on.

GPUs come from jax's CUDA plug-in, whose compiler needs neither a GPU nor CUDA's
libraries, and a description of the GPU; TPUs from libtpu. Both are optional, and both
disturb ordinary runs: plan in a subprocess, with `JAX_PLATFORMS=cpu` (see
`prepare_process`).
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # TODO(jax issue 23971): no public way, see below.
from jax.experimental import topologies

from jaxpar.compiled.hardware import Hardware, load_hardware, target_config

_CUDA_PLUGIN = "jax_plugins.xla_cuda13"


def prepare_process() -> None:
    """Configure the process, before jax's first device is requested.

    Hides present GPUs and TPUs, because a plug-in that finds one starts it; and finds
    compilers in the environment's folder ``compilers``, which ordinary processes ignore
    (``pip install --target``).
    """
    folder = os.path.join(sys.prefix, "compilers")
    if os.path.isdir(folder) and folder not in sys.path:
        sys.path.append(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # Several plans may run at once.
    jax.config.update("jax_platforms", "cpu")


def gpu_devices(kind: str | Hardware, hosts: int, gpus: int) -> Sequence[Any]:
    """Make GPUs to compile for.

    Args:
      kind: such as "h200", or a `Hardware` of your own.
      hosts: how many hosts.
      gpus: GPUs on each.

    Returns:
      hosts * gpus devices, host by host.

    Raises:
      ModuleNotFoundError: if jax's CUDA plug-in is not installed.
    """
    hardware = kind if isinstance(kind, Hardware) else load_hardware(kind)
    _register_cuda()
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_config(hardware),
        topology=f"{hosts}x{gpus}x1",
    ).devices


def tpu_devices(topology: str) -> Sequence[Any]:
    """Make TPUs to compile for.

    Args:
      topology: such as "v5e:8x8" or "v5p:4x4x4".

    Returns:
      The topology's devices.

    Raises:
      ModuleNotFoundError: if libtpu is not installed.
    """
    if not has_tpu_compiler():
        raise ModuleNotFoundError(
            "target: TPUs need libtpu's compiler; pip install libtpu, in the version "
            "that matches your jax."
        )
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def has_gpu_compiler() -> bool:
    """Whether jax's CUDA plug-in is installed."""
    return _found(_CUDA_PLUGIN) is not None


def has_tpu_compiler() -> bool:
    """Whether libtpu is installed."""
    return _found("libtpu") is not None


def _found(module: str) -> Path | None:
    """The file of an importable module; None if there is no such module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _register_cuda() -> None:
    plugin = _found(_CUDA_PLUGIN)
    if plugin is None:
        raise ModuleNotFoundError(
            "target: GPUs need the compiler in jax's CUDA plug-in; pip install "
            "--no-deps jax-cuda13-plugin jax-cuda13-pjrt, of your jaxlib's version."
        )
    jax.devices()  # Finds the plug-in where it registers itself.
    if "cuda" not in xla_bridge._topology_factories:
        library = plugin.parent / "xla_cuda_plugin.so"
        xla_bridge.register_plugin("cuda", priority=-1, library_path=str(library))
    _accept_cuda()


@functools.cache
def _accept_cuda() -> None:
    """Accept "cuda" as a platform to lower for, without a GPU.

    TODO(jax issue 23971): drop when a lowering for a platform without devices works.
    """
    canonicalize = xla_bridge.canonicalize_platform

    def accepting_cuda(platform: str) -> str:
        try:
            return canonicalize(platform)
        except RuntimeError:
            return "cuda"

    xla_bridge.canonicalize_platform = accepting_cuda
