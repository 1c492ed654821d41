"""Which optimizers can be streamed, and how does a run get one?"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp

from jaxpar.mesh import PIPE
from jaxpar.offload.choose_update import measure_update
from jaxpar.offload.cpu_update import CpuUpdate
from jaxpar.offload.disk_room import check_disk
from jaxpar.offload.disk_update import DiskUpdate
from jaxpar.offload.host_leaves import choose_host_leaves
from jaxpar.offload.options import Offload
from jaxpar.offload.room import CGROUP, MEMINFO, check_room
from jaxpar.offload.streamed_update import StreamedUpdate
from jaxpar.progress import announce, waiting
from jaxpar.step.update import MakesUpdate, Update, UpdateSpec
from jaxpar.types import Params, PyTree

_LEAST = 64
"""Leaves of fewer than a piece's elements by this stay on the device."""

U = TypeVar("U", bound=CpuUpdate)

Maker = Callable[[Any, UpdateSpec], Update]


@dataclasses.dataclass(frozen=True)
class StreamedOptimizer:
    """An optimizer whose state is in host memory; see `MakesUpdate`.

    Attributes:
      inner: the optimizer.
      make: makes the update of any optimizer.
      options: what is offloaded.
    """

    inner: Any
    make: Maker
    options: Offload

    def init(self, params: Params) -> PyTree:
        """See `MakesUpdate`."""
        return self.inner.init(params)

    def make_update(self, spec: UpdateSpec) -> Update:
        """See `MakesUpdate`.

        Raises:
          ValueError: if the optimizer stores its state in a form of its own, or gets
            the gradients of every data shard; or if the host has no room.
        """
        inner = self.make(self.inner, spec)
        leaf, name = spec.leaf_shardings[0], type(self.inner).__name__
        if type(inner).pack is not Update.pack:
            raise ValueError(
                f"offload: optimizer={name} stores its state in a form of its own, "
                "which is not streamed; use the optax optimizer of the same rule, or "
                "Offload(optimizer=None)."
            )
        if inner.reduction.gradient_shape(leaf) != leaf.shape:
            raise ValueError(
                f"offload: optimizer={name} gets the gradients of every data shard, "
                "whole; its state is not streamed. Use Offload(optimizer=None)."
            )
        elements = max(1, int(self.options.piece_mb * 1e6) // 4)
        least = elements // _LEAST
        by_host = self.options.path is not None or self.options.update != "device"
        rows = _stacks_of_rows(spec) if by_host else ()
        leaves = choose_host_leaves(spec, self.options.fraction, least, rows)
        held = sum(leaf.num_bytes for leaf in leaves.values())
        given: Any = inner, spec, leaves, elements
        if self.options.path is not None:
            made = DiskUpdate(
                *given,
                reduction=inner.reduction,
                path=Path(self.options.path).expanduser().absolute(),
            )
            made = self._fetching(made)
            made.require_by_element()
            check_disk(made.traffic().on_disk, spec.mesh, made.path)
            return made
        check_room(held, spec.mesh, MEMINFO, CGROUP)
        if self.options.update == "device":
            return StreamedUpdate(*given, reduction=inner.reduction)
        delay = self.options.delay_after if self.options.delayed else None
        if delay is not None and spec.compute_dtype == jnp.float32:
            raise ValueError(
                "offload: delayed=True needs precision='bf16' or 'fp16': in fp32 the "
                "devices read the masters while the host writes them."
            )
        made = CpuUpdate(*given, reduction=inner.reduction, delay_after=delay)
        if self.options.update == "host":
            return self._fetching(made)
        with waiting("timing the update on devices and host"):
            times = measure_update(made)
        said = {"reduction": inner.reduction, "remarks": (str(times),)}
        announce(str(times))
        if times.faster == "device":
            return StreamedUpdate(*given, **said)
        return CpuUpdate(*given, **said)

    def _fetching(self, made: U) -> U:
        """An update that leaves parameters off the device, if that is asked for."""
        asked, mesh = self.options.params, made.spec.mesh
        if asked is None:
            return made
        if mesh.shape[PIPE] > 1:
            raise ValueError(
                f"offload: params={asked!r} fetches the layers of a loop, but pipe="
                f"{mesh.shape[PIPE]} divides them already; use pipe=1, or params=None."
            )
        fetched = made.spec.by_layer.intersection(made.streamed_names)
        if made.spec.by_layer and not fetched:
            raise ValueError(
                f"offload: params={asked!r} fetches stacks larger than a piece, but "
                f"none here is larger than piece_mb={self.options.piece_mb:g} MB of "
                "float32 on each device; choose a smaller piece_mb, or use params=None."
            )
        if not fetched:
            raise ValueError(
                f"offload: params={asked!r} fetches the layers of a loop, but the loss "
                "has no scan over stacks of parameters; scan over the layers, as the "
                "models of jaxpar do, or use params=None."
            )
        return dataclasses.replace(
            made, fetched=fetched, layers_on_disk=asked == "disk"
        )


def _stacks_of_rows(spec: UpdateSpec) -> tuple[str, ...]:
    """The parameters whose layers a TPU can't read or write in host memory.

    XLA:TPU refuses single rows of half precision there: "Sublane slicing size must be
    multiple of element packing factor" (jax 0.11.2).
    """
    if spec.mesh.devices.flat[0].platform != "tpu":
        return ()
    return tuple(
        leaf.name
        for leaf in spec.leaf_shardings
        if len(leaf.shape) == 2 and leaf.name in spec.by_layer
    )


def offloaded(optimizer: Any, options: Offload | None, make: Maker) -> Any:
    """The optimizer that a run with some options has.

    Args:
      optimizer: an optimizer.
      options: what is offloaded; None for nothing.
      make: makes the update of any optimizer.

    Returns:
      The optimizer itself, or a `StreamedOptimizer`. A fused optimizer is replaced by
      the equal optax transformation: streamed pieces are bound by the link to the host.
    """
    if options is None or options.optimizer is None:
        return optimizer
    if isinstance(optimizer, MakesUpdate) and getattr(optimizer, "bits", 8) == 32:
        optimizer = getattr(optimizer, "equal", optimizer)
    return StreamedOptimizer(optimizer, make, options)
