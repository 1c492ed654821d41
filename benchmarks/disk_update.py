"""Which share of a disk's bandwidth does a step with its state on disk reach?

A model of two large matmuls, AdamW, masters and moments on disk. The time of its update
takes turns with a plain measurement of the same disk that reads and writes at once
(`jaxpar env --disk`). Needs four times the state's bytes there.

    python benchmarks/disk_update.py --folder /a/folder/on/the/disk
"""

import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.offload.disk_pipeline import DiskPipeline
from jaxpar.offload.disk_speed import measure_disk


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed, where, and how often."""

    folder: str = "."
    """On the disk that is measured; a folder is made there, and removed."""
    width: int = 8192
    """Of the matmuls: two kernels of so many rows and columns, 12 bytes an element."""
    rounds: int = 7
    """Turns of each; the median counts."""
    piece_mb: float = 8.0
    """As `jaxpar.Offload` takes it."""
    write: bool = True
    """Write benchmarks/results/disk_update.json."""


class Model(nnx.Module):
    """Two large matmuls."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, width] -> [B, width]."""
        return self.down(nnx.relu(self.up(x)))


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Half of the mean square of what the model returns."""
    return jnp.mean(model(batch["x"]).astype(jnp.float32) ** 2)


def update_seconds(engine: jaxpar.Engine, batch: dict[str, np.ndarray]) -> float:
    """The time that a step's update takes: reading, computing, writing and syncing."""
    took = []
    real = DiskPipeline.run

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        real(*args)
        took.append(time.perf_counter() - began)

    with mock.patch.object(DiskPipeline, "run", timed):
        float(engine.step(batch)["loss"])
    (seconds,) = took
    return seconds


def main(config: Config) -> None:
    """Measure, print, write."""
    console, folder = Console(), Path(tempfile.mkdtemp(dir=config.folder))
    batch = {"x": np.ones((8, config.width), np.float32)}
    moved = 2 * 12 * 2 * config.width**2
    try:
        engine = jaxpar.initialize(
            model=lambda rngs: Model(config.width, rngs),
            loss_fn=loss_fn,
            optimizer=optax.adamw(1e-4),
            sample_batch=batch,
            mesh=jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1]),
            precision="bf16",
            offload=jaxpar.Offload(
                optimizer="disk", path=str(folder / "state"), piece_mb=config.piece_mb
            ),
        )
        update_seconds(engine, batch)
        plain, own = [], []
        for _ in range(config.rounds):
            plain.append(measure_disk(folder, moved // 4).both)
            own.append(moved / update_seconds(engine, batch))
    finally:
        shutil.rmtree(folder)
    rates = {"disk": statistics.median(plain), "update": statistics.median(own)}
    share = statistics.median(o / p for o, p in zip(own, plain, strict=True))
    for name, rate in rates.items():
        console.print(f"{name}: {rate / 1e9:.2f} GB/s, reading and writing at once")
    console.print(f"the update reaches {share:.2f} of the disk's bandwidth")
    if config.write:
        found = {"bytes_per_second": rates, "share": share, "moved_bytes": moved}
        console.print(write_result("disk_update", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
