"""One process of a group: makes engines, and takes and times steps when asked.

    python benchmarks/network/worker.py SPEC

SPEC is JSON, the fields of a `Spec`. A line of input is JSON: a technique's name, steps
that are not timed, and steps that are. A line of output answers it.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.contestants.protocol import answer
from benchmarks.network.techniques import make_batch, make_engine
from jaxpar.launch.gloo import listen_on

PORT, START_SECONDS = 7878, 120


@dataclasses.dataclass(frozen=True)
class Spec:
    """A process of a group, and what it trains.

    Attributes:
      addresses: of all hosts.
      index: of this one.
      width: of the model.
      layers: of the model.
      rows: of each process, in a step.
    """

    addresses: list[str]
    index: int
    width: int
    layers: int
    rows: int


def join(spec: Spec) -> None:
    """Become one of the group, of one CPU device each."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{spec.addresses[0]}:{PORT}",
        num_processes=len(spec.addresses),
        process_id=spec.index,
        initialization_timeout=START_SECONDS,
        cluster_detection_method="deactivate",
    )
    listen_on(spec.addresses[spec.index])


def sent_bytes() -> int:
    """What this host has sent until now, with headers, as its link counts it."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "eth0":
            return int(numbers.split()[8])
    raise RuntimeError("This process is not on a host of a Network: it has no eth0.")


def main(spec: Spec) -> None:
    """Answer until input ends."""
    join(spec)
    of_model = spec.width, spec.layers, spec.rows * len(spec.addresses)
    batch = make_batch(spec.width, spec.rows, seed=spec.index)
    engines = {}
    answer({"processes": jax.process_count()})
    for line in sys.stdin:
        name, warm, timed = json.loads(line)
        if name not in engines:
            engines[name] = make_engine(name, *of_model)
        engine, metrics = engines[name], {"loss": np.nan, "skipped": 0}
        for _ in range(warm):
            metrics = engine.step(batch)
            float(metrics["loss"])
        sent, began = sent_bytes(), time.perf_counter()
        for _ in range(timed):
            metrics = engine.step(batch)
            float(metrics["loss"])
        seconds = time.perf_counter() - began
        ended = {of: float(metrics[of]) for of in ("loss", "skipped")}
        answer({"seconds": seconds, "sent": sent_bytes() - sent, **ended})


def end_at_once(*error: Any) -> None:
    """Report an error and end: JAX's own way out waits for processes that may hang."""
    sys.__excepthook__(*error)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.excepthook = end_at_once
    main(Spec(**json.loads(sys.argv[1])))
