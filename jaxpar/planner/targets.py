"""What is a plan's target: a number of devices of a kind, such as "h200:8x8"."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxpar.compiled.hardware import Hardware, kinds, load_hardware
from jaxpar.launch.devices import cpu_devices
from jaxpar.launch.extras import pip_install
from jaxpar.planner.absent_devices import (
    gpu_devices,
    has_gpu_compiler,
    has_tpu_compiler,
    tpu_devices,
)


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to plan for.

    Attributes:
      name: as given, such as "h200:8x8".
      hosts: how many hosts; a TPU slice counts as one, because one network joins it.
      devices_per_host: devices on each.
      hardware: the device's rates; None for the CPU, for which only memory and traffic
        are planned.
      topology: a TPU slice's shape, such as "4x4"; empty for others.
    """

    name: str
    hosts: int
    devices_per_host: int
    hardware: Hardware | None
    topology: str = ""

    @property
    def num_devices(self) -> int:
        """Devices on all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def has_compiler(self) -> bool:
        """Whether the compiler for its devices is installed."""
        if self.hardware is None:
            return True
        is_gpu = self.hardware.platform == "cuda"
        return has_gpu_compiler() if is_gpu else has_tpu_compiler()

    @property
    def remedy(self) -> str:
        """The command that installs its compiler."""
        is_gpu = self.hardware is not None and self.hardware.platform == "cuda"
        extra = "plan-gpu" if is_gpu else "plan-tpu"
        return pip_install(extra)

    def devices(self) -> Sequence[Any]:
        """Make the devices to compile for; CPU devices if no compiler is installed.

        Returns:
          `num_devices` of them, host by host.
        """
        if self.hardware is None or not self.has_compiler:
            jax.config.update("jax_platforms", "cpu")
            return cpu_devices(self.num_devices)
        if self.hardware.platform == "cuda":
            return gpu_devices(self.hardware, self.hosts, self.devices_per_host)
        return tpu_devices(f"{self.hardware.kind}:{self.topology}")


def parse_target(name: str) -> Target:
    """Read a target's name.

    Args:
      name: ``KIND:HOSTSxGPUS`` for GPUs, ``KIND:TOPOLOGY`` for TPUs, ``cpu:N``.

    Returns:
      The target.

    Raises:
      ValueError: if there is no such kind, or its size has another form.

    Example:
      >>> parse_target("h200:8x8").num_devices
      64
    """
    kind, _, size = name.partition(":")
    if kind not in (*kinds(), "cpu"):
        near = difflib.get_close_matches(kind, (*kinds(), "cpu"), n=1, cutoff=0.4)
        raise ValueError(
            f"target={name!r}: {kind!r} must be one of {', '.join(kinds())} or cpu."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    if kind == "cpu":
        if not re.fullmatch(r"[1-9]\d*", size):
            raise ValueError(
                f"target={name!r} must be cpu:N, N devices, such as cpu:8."
            )
        return Target(name, 1, int(size), None)
    hardware = load_hardware(kind)
    if hardware.platform == "cuda":
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
            raise ValueError(
                f"target={name!r} must be {kind}:HOSTSxGPUS, such as {kind}:1x8 for "
                f"one host or {kind}:64x8 for 512 GPUs."
            )
        hosts, gpus = map(int, size.split("x"))
        return Target(name, hosts, gpus, hardware)
    dims = 3 if kind.endswith("p") else 2
    if not re.fullmatch("x".join([r"[1-9]\d*"] * dims), size):
        raise ValueError(
            f"target={name!r} must be {kind}:{'x'.join('XYZ'[:dims])}, the slice's "
            f"shape in chips, such as {kind}:{'x'.join(['4'] * dims)}."
        )
    num_devices = 1
    for side in size.split("x"):
        num_devices *= int(side)
    return Target(name, 1, num_devices, hardware, topology=size)
