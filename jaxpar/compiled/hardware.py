"""What can a kind of device do: memory, peak rates and links, from a TOML file.

One file per kind, ``devices/KIND.toml``, with the source of each number. A new kind is
a new file.
"""

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "devices"

_MATRIX_TYPES = {
    "4": (32,),
    "8": (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36),
    "16": (10, 16),
    "32": (11,),
    "64": (12,),
}
"""XLA's numbers of the dtypes of a matrix unit, by their bits."""

_SCALAR_TYPES = {4: (64, 1), 8: (64, 1), 10: (128, 0), 11: (128, 1), 12: (64, 1)}
"""XLA's number of a dtype -> units per core and operations per clock; 0: as 16 bits."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device and its links.

    Attributes:
      kind: such as "h100".
      name: the vendor's.
      called: names that JAX has for it (``jax.Device.device_kind``).
      platform: "cuda", "tpu" or "cpu".
      memory_bytes: of the device's own memory.
      memory_rate: bytes per second, reads and writes.
      memory_achieved: fraction of that rate that programs reach.
      peak: dtype -> peak FLOP/s of matmuls.
      peak_achieved: fraction of it that large matmuls reach.
      inside_host: bytes per second that a device sends to others of its host.
      between_hosts: likewise, to devices of other hosts.
      links_achieved: fraction of both that large collectives reach.
      host_memory_bytes: of the host, for each of its devices; None where unknown.
      host_rate: bytes per second that a device copies to its host, and as many back;
        infinite where unknown.
      host_achieved: fraction of it that large copies reach.
      host_memory_rate: bytes per second that the host's cores read and write in its
        memory for each device, as large passes reach it; infinite where unknown.
      disk_rate: likewise, of the host's disks, reading and writing at once.
      sources: the sources of the numbers, by section.
      compiler: the GPU's entries of XLA's target config; empty for others.
    """

    kind: str
    name: str
    called: tuple[str, ...]
    platform: str
    memory_bytes: int
    memory_rate: float
    memory_achieved: float
    peak: Mapping[str, float]
    peak_achieved: float
    inside_host: float
    between_hosts: float
    links_achieved: float
    host_memory_bytes: int | None
    host_rate: float
    host_achieved: float
    host_memory_rate: float
    disk_rate: float
    sources: Mapping[str, str]
    compiler: Mapping[str, Any]


@functools.cache
def kinds() -> tuple[str, ...]:
    """Every kind that has a file."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@functools.cache
def load_hardware(kind: str) -> Hardware:
    """Read a kind's file.

    Args:
      kind: one of `kinds`.

    Returns:
      The device.

    Example:
      >>> load_hardware("h100").name
      'NVIDIA H100 80GB HBM3'
    """
    found = tomllib.loads((_FOLDER / f"{kind}.toml").read_text())
    memory, peak, links = found["memory"], dict(found["peak"]), found["links"]
    host, work = found.get("host", {}), found.get("host_work", {})
    tables = (
        "memory",
        "peak",
        "links",
        *(n for n in ("host", "host_work") if n in found),
    )
    sources = {name: found[name]["source"] for name in tables}
    achieved = peak.pop("achieved")
    del peak["source"]
    return Hardware(
        kind=kind,
        name=found["name"],
        called=tuple(found.get("called", [found["name"]])),
        platform=found["platform"],
        memory_bytes=memory["bytes"],
        memory_rate=memory["bytes_per_second"],
        memory_achieved=memory["achieved"],
        peak=peak,
        peak_achieved=achieved,
        inside_host=links["inside_host"],
        between_hosts=links["between_hosts"],
        links_achieved=links["achieved"],
        host_memory_bytes=host.get("bytes"),
        host_rate=host.get("bytes_per_second", math.inf),
        host_achieved=host.get("achieved", 1.0),
        host_memory_rate=work.get("memory_bytes_per_second", math.inf)
        * work.get("memory_achieved", 1.0),
        disk_rate=work.get("disk_bytes_per_second", math.inf),
        sources=sources,
        compiler=found.get("compiler", {}),
    )


def hardware_of(device_kind: str) -> Hardware | None:
    """The hardware of a device that is here.

    Args:
      device_kind: as JAX names it (``jax.Device.device_kind``).

    Returns:
      Its file's; None for one without a file, as a CPU.

    Example:
      >>> hardware_of("TPU v5 lite").kind
      'v5e'
    """
    all_kinds = map(load_hardware, kinds())
    return next((each for each in all_kinds if device_kind in each.called), None)


def target_config(hardware: Hardware) -> str:
    """Describe a GPU to XLA's compiler.

    Args:
      hardware: a GPU.

    Returns:
      A `stream_executor.GpuTargetConfigProto` as text.
    """
    own = hardware.compiler
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_core: {own["shared_memory_per_core"]}
  shared_memory_per_block_optin: {own["shared_memory_per_block"]}
  core_count: {own["cores"]} fpus_per_core: {own["fpus_per_core"]}
  clock_rate_ghz: {own["clock_ghz"]}
  memory_bandwidth: {hardware.memory_rate:.0f}
  device_memory_size: {hardware.memory_bytes} l2_cache_size: {own["l2_bytes"]}
  pcie_bandwidth: {own["pcie_bytes_per_second"]}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  cuda_compute_capability {{
    major: {own["capability"]} feature_extension: {own["features"]}
  }}
  {_rates(own)}
  device_vendor: "NVIDIA Corporation" name: "{hardware.name}"
  device_address_bits: 64 ecc_enabled: true
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{hardware.name}"
"""


def _rates(own: Mapping[str, Any]) -> str:
    """The rates of the units by dtype, where a file gives them."""
    if "matrix_ops" not in own:
        return ""
    scalar = [
        _rate(number, own["clock_ghz"], units, ops or own["half_ops"])
        for number, (units, ops) in {**_SCALAR_TYPES, 16: (128, 0)}.items()
    ]
    matrix = [
        _rate(number, own["matrix_clock_ghz"], 4, ops)
        for bits, ops in own["matrix_ops"].items()
        for number in _MATRIX_TYPES[bits]
    ]
    return (
        f"scalar_unit_description {{ {' '.join(scalar)} }} "
        f"matrix_unit_description {{ {' '.join(sorted(matrix))} }}"
    )


def _rate(number: int, clock: float, units: int, ops: int) -> str:
    return (
        f"rate_infos {{ key: {number} value {{ clock_rate_ghz: {clock} "
        f"units_per_core: {units} ops_per_clock: {ops} }} }}"
    )
