"""How fast does a device send over some mesh axes, inside its host or between hosts?"""

import collections
import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from jaxpar.compiled.hardware import Hardware

INSIDE, BETWEEN = "inside host", "between hosts"
TO_DEVICE, TO_HOST = ("host to device",), ("device to host",)
"""In place of mesh axes: the two directions of a device's link to its host."""

GPUS_PER_HOST = 8
"""Assumed where neither a target nor the devices say how many GPUs a host has."""


@dataclasses.dataclass(frozen=True)
class LinkRates:
    """The links of a mesh's devices.

    Attributes:
      sizes: mesh axis -> devices on it, in the mesh's order, numbered host by host.
      devices_per_host: devices on each host.
      inside_host: bytes per second that large collectives of a device send to others of
        its host.
      between_hosts: likewise, to devices of other hosts.
      host: bytes per second that a device copies to its host, and as many back.
    """

    sizes: Mapping[str, int]
    devices_per_host: int
    inside_host: float
    between_hosts: float
    host: float = math.inf

    def link(self, axes: tuple[str, ...]) -> str:
        """The slowest link of groups over these axes: `INSIDE`, `BETWEEN` or a
        direction of the link to the host."""
        if axes in (TO_DEVICE, TO_HOST):
            return axes[0]
        spans = spans_hosts(axes, self.sizes, self.devices_per_host)
        return BETWEEN if spans else INSIDE

    def rate(self, axes: tuple[str, ...]) -> float:
        """Bytes per second that one device sends in a collective over these axes.

        Groups with several members on a host use the links of all of them.
        """
        if axes in (TO_DEVICE, TO_HOST):
            return self.host
        if self.link(axes) == INSIDE:
            return self.inside_host
        members = members_per_host(axes, self.sizes, self.devices_per_host)
        return min(self.inside_host, self.between_hosts * members)


def link_rates_of(
    hardware: Hardware, sizes: Mapping[str, int], devices_per_host: int
) -> LinkRates:
    """The links of devices, at the rates that large collectives reach.

    Args:
      hardware: the kind of device.
      sizes: as in `LinkRates`.
      devices_per_host: likewise.
    """
    return LinkRates(
        sizes=dict(sizes),
        devices_per_host=devices_per_host,
        inside_host=hardware.inside_host * hardware.links_achieved,
        between_hosts=hardware.between_hosts * hardware.links_achieved,
        host=hardware.host_rate * hardware.host_achieved,
    )


def count_per_host(mesh: Mesh) -> int:
    """Devices of a mesh that share a host.

    GPUs: the most that one process has, or `GPUS_PER_HOST` where each process has one,
    as absent GPUs do. One network joins a TPU slice, which counts as one host.
    """
    devices = mesh.devices.flat
    if devices[0].platform != "gpu":
        return mesh.size
    of_process = collections.Counter(device.process_index for device in devices)
    most = max(of_process.values())
    return most if most > 1 else min(GPUS_PER_HOST, mesh.size)


def spans_hosts(
    axes: tuple[str, ...], sizes: Mapping[str, int], devices_per_host: int
) -> bool:
    """Whether groups over these axes have devices of several hosts."""
    group = math.prod(sizes[axis] for axis in axes)
    return members_per_host(axes, sizes, devices_per_host) < group


def members_per_host(
    axes: tuple[str, ...], sizes: Mapping[str, int], devices_per_host: int
) -> int:
    """How many devices of a group over these axes share a host."""
    numbers = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    first = tuple(slice(None) if axis in axes else 0 for axis in sizes)
    hosts = numbers[first].reshape(-1) // devices_per_host
    return int(np.bincount(hosts - hosts.min()).max())
