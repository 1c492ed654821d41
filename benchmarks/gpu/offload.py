"""How fast does a GPU copy to its host and back, and what does offload cost a step?"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jaxpar
from benchmarks.gpu.session import Rows, Session
from benchmarks.gpu.training import predicted_beside, timed
from benchmarks.gpu.workloads import of_model
from benchmarks.kernels.timing import seconds
from jaxpar.offload.disk_speed import measure_disk
from jaxpar.offload.room import CGROUP, MEMINFO, free_bytes

ROUNDS = 10
_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


def copies(session: Session) -> Rows:
    """Large copies from pinned host memory, to it, and both at once."""
    elements = 1 << (16 if session.dry else 28)
    rounds = 2 if session.dry else ROUNDS
    device = jax.devices()[0]
    here = jax.device_put(jnp.ones((elements,), jnp.float32), device)
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    there = jax.device_put(here, pinned)
    ways: dict[str, Callable[..., Any]] = {
        "to the device": lambda here, there: jax.device_put(there, _DEVICE),
        "to the host": lambda here, there: jax.device_put(here, _HOST),
        "both at once": lambda here, there: (
            jax.device_put(here, _HOST),
            jax.device_put(there, _DEVICE),
        ),
    }
    for name, way in ways.items():
        rate = here.nbytes / seconds(way, (here, there), rounds)
        yield name, {"each_way_gb_per_second": rate / 1e9}


def step(
    session: Session,
    model: str,
    *,
    batch: int,
    accumulate: int,
    offload: dict[str, Any] | None,
    changes: dict[str, Any] | None = None,
) -> Rows:
    """A step with full remat.

    Args:
      session: where it runs.
      model: its name.
      batch: rows.
      accumulate: micro-batches.
      offload: fields of `jaxpar.Offload`; None without it. What is on disk is in a
        folder beside this one, which is removed.
      changes: fields of the model's config, over those of its name.
    """
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="offload-") as folder:
        on_disk = offload is not None and offload.get("optimizer") == "disk"
        given = {**(offload or {}), **({"path": folder} if on_disk else {})}
        options = None if offload is None else jaxpar.Offload(**given)
        if on_disk:
            yield "disk", dataclasses.asdict(measure_disk(Path(folder)))
        yield from _step(session, model, batch, accumulate, options, changes)


def _step(
    session: Session,
    model: str,
    batch: int,
    accumulate: int,
    offload: jaxpar.Offload | None,
    changes: dict[str, Any] | None,
) -> Rows:
    workload = of_model(
        model,
        batch=batch,
        remat="full",
        accumulate=accumulate,
        offload=offload,
        **(changes or {}),
    )
    free = free_bytes(MEMINFO, CGROUP)
    report = workload.engine.explain()
    yield (
        "step",
        timed(session, workload)
        | {
            "on_host_gb": report.host_bytes_per_device / 1e9,
            "host_free_gb": (free or 0) / 1e9,
        },
    )
    in_one = offload is None or (offload.update == "device" and offload.path is None)
    if in_one:
        yield "predicted", predicted_beside(session, workload)
