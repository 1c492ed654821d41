"""How fast does a GPU copy to its host and back, and what does offload cost a step?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jaxpar
from benchmarks.gpu.session import Rows, Session
from benchmarks.gpu.training import predicted_beside, timed
from benchmarks.gpu.workloads import of_model
from benchmarks.kernels.timing import seconds
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
      offload: fields of `jaxpar.Offload`; None without it.
      changes: fields of the model's config, over those of its name.
    """
    workload = of_model(
        model,
        batch=batch,
        remat="full",
        accumulate=accumulate,
        offload=None if offload is None else jaxpar.Offload(**offload),
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
    if offload is None or offload.get("update") != "host":
        yield "predicted", predicted_beside(session, workload)
