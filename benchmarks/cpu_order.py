"""Are steps on CPU devices right, and as fast, in the order that XLA is given?

Trains a GPT at ZeRO 3 on CPU devices, each time in a process of its own, with the
setting of `jaxpar.compiled.xla_flags` and with XLA's default; losses of the first steps
are compared with those of one device.

    python benchmarks/cpu_order.py
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse

OPTION = "xla_cpu_scheduler_type"


@dataclasses.dataclass(frozen=True)
class Config:
    """What is run."""

    processes: int = 6
    """Of each order."""
    devices: int = 2
    """Of each process."""
    steps: int = 12
    """Of each process."""
    write: bool = True
    """Write benchmarks/results/cpu_order.json."""


def train(devices: int, steps: int, *, default: bool) -> None:
    """Take steps, and print their losses and the median time of a step."""
    import jax  # noqa: PLC0415 - after the environment
    import numpy as np  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import jaxpar  # noqa: PLC0415
    from jaxpar.models import (  # noqa: PLC0415
        DecoderConfig,
        decoder_loss,
        make_decoder,
    )

    config = DecoderConfig(
        vocab_size=256, seq_len=128, num_layers=8, num_heads=4, width=256
    )
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (8, 129), np.int32)}
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.sgd(1e-2),
        sample_batch=batch,
        mesh=jaxpar.MeshShape(data=devices),
        devices=jax.devices()[:devices],
        zero=3,
        check_loss=False,
        xla_options={OPTION: None} if default else None,
    )
    losses, times = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(float(engine.step(batch)["loss"]))
        times.append(time.perf_counter() - began)
    print(json.dumps({"losses": losses, "seconds": statistics.median(times[2:])}))


def in_process(config: Config, devices: int, *, default: bool) -> dict[str, Any] | None:
    """Train in a process of its own; None if it is aborted."""
    call = f"train({devices}, {config.steps}, default={default})"
    flags = f"--xla_force_host_platform_device_count={config.devices}"
    done = subprocess.run(
        [sys.executable, "-c", f"from benchmarks.cpu_order import train; {call}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def main(config: Config) -> None:
    """Run, print and record."""
    alone = in_process(config, 1, default=True)
    if alone is None:
        raise SystemExit("one device: the process was aborted.")
    right, found = alone["losses"], {}
    table = Table("order", "right", "another loss", "aborted", "median step, ms")
    for name, default in (("jaxpar's setting", False), ("XLA's default", True)):
        runs = [
            in_process(config, config.devices, default=default)
            for _ in range(config.processes)
        ]
        ended = [run for run in runs if run is not None]
        wrong = [run for run in ended if not is_close(run["losses"], right)]
        own = {
            "right": len(ended) - len(wrong),
            "another_loss": len(wrong),
            "aborted": len(runs) - len(ended),
            "median_ms": 1e3 * statistics.median(x["seconds"] for x in ended)
            if ended
            else None,
        }
        found[name] = own
        shown = "" if own["median_ms"] is None else f"{own['median_ms']:.0f}"
        counts = [str(own[key]) for key in ("right", "another_loss", "aborted")]
        table.add_row(name, *counts, shown)
    Console().print(table)
    if config.write:
        print(write_result("cpu_order", found))


def is_close(losses: list[float], right: list[float]) -> bool:
    """Whether all losses are those of one device, to 1e-4."""
    return all(abs(a - b) <= 1e-4 * b for a, b in zip(losses, right, strict=True))


if __name__ == "__main__":
    main(parse(Config, __doc__))
