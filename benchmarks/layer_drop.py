"""Does a step that leaves layers out take less time by as much as it should?

A GPT on CPU devices: whole, and with layers left out, taking turns; steps of one layer
tell what is not layers (embedding, head, optimizer). The schedule stands at its end
from the second step on. Which layers a step left out is seen by what it did not train:
the layers' time is held to the share that was run. Seconds are of the clock, and of
the processor, which others' work on the machine touches less.

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/layer_drop.py
"""

import dataclasses
import os
import statistics
import sys
import time
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
from jaxpar.tree import named_leaves

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
    """Of each, in turns; which layers are left out differs by step."""
    write: bool = True
    """Write benchmarks/results/layer_drop.json."""


CLOCKS = {"clock": time.perf_counter, "processor": time.process_time}
PAPER = LayerDrop(theta=0.5, gamma=1e-3)
"""Of Zhang & He: gamma is 100 / steps."""
PAPER_STEPS, PAPER_LAYERS = 100_000, 12


class Timed:
    """An engine whose steps are timed.

    Args:
      layers: of the model.
      zero: the stage.
      drop: which layers are left out; None for none.
    """

    def __init__(self, layers: int, zero: int, drop: LayerDrop | None = None):
        config = DecoderConfig(
            vocab_size=256, seq_len=128, num_layers=layers, num_heads=4, width=256
        )
        drawn = np.random.default_rng(0).integers(0, 256, (8, 129), np.int32)
        self.batch = {"tokens": drawn}
        self.seconds: dict[str, list[float]] = {}
        self.counts: list[int] = []
        self.engine = jaxpar.initialize(
            model=dataclasses.replace(make_decoder(config), layer_drop=drop),
            loss_fn=decoder_loss,
            optimizer=optax.sgd(1e-2),
            sample_batch=self.batch,
            mesh=jaxpar.MeshShape(data=jax.device_count()),
            zero=zero,
            check_loss=False,
        )
        self.weights = self._weights()
        # The first step compiles. On CPUs at ZeRO 3 its numbers may be wrong, or not
        # finite: XLA runs a loop's gathers beside those that stand outside of it.
        for _ in range(2):
            self.step()
        self.counts.clear()
        self.seconds = {clock: [] for clock in CLOCKS}

    def step(self) -> None:
        """Take a step, and see which layers it has trained."""
        began = {clock: read() for clock, read in CLOCKS.items()}
        float(self.engine.step(self.batch)["loss"])
        for clock, read in CLOCKS.items():
            self.seconds.setdefault(clock, []).append(read() - began[clock])
        before, self.weights = self.weights, self._weights()
        self.counts.append(int((before != self.weights).any(1).sum()))

    def _weights(self) -> np.ndarray:
        """[layers, ...] of the MLP: those of layers left out stay the same."""
        named = named_leaves(self.engine.state.params["blocks"])
        kernel = named["mlp/down/kernel"]
        # A copy: the next step writes into the array.
        return np.array(kernel).reshape(kernel.shape[0], -1)

    def median(self, clock: str) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[clock])

    def by_count(self, clock: str) -> dict[int, float]:
        """Layers that a step ran -> the median of such steps' seconds."""
        found: dict[int, list[float]] = {}
        for count, seconds in zip(self.counts, self.seconds[clock], strict=True):
            found.setdefault(count, []).append(seconds)
        return {n: statistics.median(own) for n, own in sorted(found.items())}


def measure(config: Config, zero: int) -> dict[str, Any]:
    """The layers' time, of that of all, and the share of layers that were run."""
    drop = LayerDrop(theta=config.theta, gamma=1e9)
    whole = Timed(config.layers, zero)
    left_out = Timed(config.layers, zero, drop)
    one = Timed(1, zero)
    for _ in range(config.steps):
        for own in (whole, left_out, one):
            own.step()
    run = sum(left_out.counts) / config.layers / config.steps
    found: dict[str, Any] = {"layers_run": run}
    for clock in CLOCKS:
        all_, single = whole.median(clock), one.median(clock)
        others = single - (all_ - single) / (config.layers - 1)
        # What is left out differs by step: a median for each number of layers.
        medians = left_out.by_count(clock)
        mean = sum(medians[n] for n in left_out.counts) / config.steps
        found[clock] = {
            "whole_ms": 1e3 * all_,
            "left_out_ms": 1e3 * mean,
            "left_out_ms_by_layers": {n: 1e3 * x for n, x in medians.items()},
            "others_ms": 1e3 * others,
            "layers_time": (mean - others) / (all_ - others),
        }
    return found


def on_paper() -> dict[str, float]:
    """What the schedule of Zhang & He leaves out over its steps."""
    steps = range(0, PAPER_STEPS, 100)
    shares = [float(PAPER.mean_share(step, PAPER_LAYERS)) for step in steps]
    run = statistics.mean(shares)
    return {"layers_run": run, "layers_share_of_step_for_24_percent": 0.24 / (1 - run)}


def main(config: Config) -> None:
    """Measure at ZeRO 0 and 3; print and record."""
    columns = "whole, ms", "left out, ms", "others, ms", "layers' time", "layers run"
    table = Table("ZeRO", "seconds of", *columns)
    found: dict[str, Any] = {}
    for zero in (0, 3):
        own = found[f"zero_{zero}"] = measure(config, zero)
        for clock in CLOCKS:
            times = own[clock]
            table.add_row(
                *(str(zero), clock),
                *(f"{times[x]:.0f}" for x in ("whole_ms", "left_out_ms", "others_ms")),
                f"{times['layers_time']:.1%}",
                f"{own['layers_run']:.1%} (+ {POINTS:.0%} allowed)",
            )
    Console().print(table)
    for name, own in found.items():
        by_layers = own["clock"]["left_out_ms_by_layers"].items()
        times = ", ".join(f"{n}: {each:.0f}" for n, each in by_layers)
        print(f"{name}: ms by layers that are run: {times}")
    paper = found["on_paper"] = on_paper()
    print(
        f"on paper, theta {PAPER.theta} and gamma {PAPER.gamma} over {PAPER_STEPS:,} "
        f"steps run {paper['layers_run']:.1%} of {PAPER_LAYERS} layers; 24 % of a step "
        f"are saved if layers take {paper['layers_share_of_step_for_24_percent']:.0%}"
    )
    if config.write:
        print(write_result("layer_drop", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
