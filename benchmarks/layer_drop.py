"""Does a step that leaves layers out take less time by as much as it should?

A GPT on CPU devices: whole, and with layers left out, taking turns; steps of one layer
tell what is not layers (embedding, head, optimizer). The schedule stands at its end
from the first step on, so that every step has the same share.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/layer_drop.py
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.models import DecoderConfig, LayerDrop, decoder_loss, make_decoder

POINTS = 0.03
"""By which the layers' time may be above their share."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed."""

    layers: int = 8
    """Of the model."""
    theta: float = 0.5
    """Share of the last layer."""
    steps: int = 60
    """Of each, in turns: what is left out differs by step."""
    write: bool = True
    """Write benchmarks/results/layer_drop.json."""


def make_step(layers: int, zero: int, drop: LayerDrop | None) -> Callable:
    """A function of a batch that takes a step, after one that compiles it."""
    config = DecoderConfig(
        vocab_size=256, seq_len=128, num_layers=layers, num_heads=4, width=256
    )
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, (8, 129), np.int32)}
    engine = jaxpar.initialize(
        model=dataclasses.replace(make_decoder(config), layer_drop=drop),
        loss_fn=decoder_loss,
        optimizer=optax.sgd(1e-2),
        sample_batch=batch,
        mesh=jaxpar.MeshShape(data=jax.device_count()),
        zero=zero,
        check_loss=False,
    )

    def step() -> float:
        began = time.perf_counter()
        float(engine.step(batch)["loss"])
        return time.perf_counter() - began

    step()
    return step


def measure(config: Config, zero: int) -> dict[str, Any]:
    """Mean seconds of the layers, whole and with some left out."""
    drop = LayerDrop(theta=config.theta, gamma=1e9)
    ways = {
        "whole": make_step(config.layers, zero, None),
        "left out": make_step(config.layers, zero, drop),
        "one layer": make_step(1, zero, None),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(config.steps):
        for name, step in ways.items():
            times[name].append(step())
    whole, one = (statistics.median(times[name]) for name in ("whole", "one layer"))
    others = one - (whole - one) / (config.layers - 1)
    # What is left out differs by step, so that a mean is needed: without the slowest
    # tenth, in which the machine did something else.
    kept = sorted(times["left out"])[: -max(1, config.steps // 10)]
    share = (statistics.mean(kept) - others) / (whole - others)
    return {
        "whole_ms": 1e3 * whole,
        "left_out_ms": 1e3 * statistics.mean(kept),
        "others_ms": 1e3 * others,
        "layers_share": share,
        "expected_share": float(drop.mean_share(1, config.layers)),
    }


def main(config: Config) -> None:
    """Measure at ZeRO 0 and 3; print and record."""
    table = Table("ZeRO", "whole, ms", "left out, ms", "layers' share", "expected")
    found = {}
    for zero in (0, 3):
        own = found[f"zero_{zero}"] = measure(config, zero)
        table.add_row(
            str(zero),
            f"{own['whole_ms']:.0f}",
            f"{own['left_out_ms']:.0f}",
            f"{own['layers_share']:.1%}",
            f"{own['expected_share']:.1%} (+ {POINTS:.0%} allowed)",
        )
    Console().print(table)
    if config.write:
        print(write_result("layer_drop", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
