"""Does a step take less time while the middle layers see half of the tokens?

A GPT on one CPU device: whole, and with random-LTD that stands at half of the tokens,
taking turns; steps of one layer tell what is not layers (embedding, head, optimizer).
Of the layers' time the share is expected that they have of the tokens: all of the first
and the last layer, half of the others. Attention needs less than half. Times are of the
process's cores, so that what else the machine does counts little.

    python benchmarks/random_ltd.py
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

import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.models import DecoderConfig, RandomLTD, decoder_loss, make_decoder

FOR_EVER = 10**9
"""Steps until all tokens are seen: every step that is timed has the first number."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed."""

    layers: int = 6
    """Of the model."""
    seq_len: int = 256
    """Tokens of a row, of which the middle layers see half."""
    steps: int = 6
    """Of each, in turns."""
    write: bool = True
    """Write benchmarks/results/random_ltd.json."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A step to time.

    Attributes:
      seconds: takes a step, and returns what it took.
      temporaries: bytes on a device.
    """

    seconds: Callable[[], float]
    temporaries: int


def make_way(config: Config, layers: int, remat: str, drop: RandomLTD | None) -> Way:
    """A step, compiled."""
    own = DecoderConfig(
        vocab_size=256,
        seq_len=config.seq_len,
        num_layers=layers,
        num_heads=4,
        width=256,
        positions="rotary",
        remat=remat,
    )
    shape = (8, config.seq_len + 1)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, shape, np.int32)}
    engine = jaxpar.initialize(
        model=dataclasses.replace(make_decoder(own), token_drop=drop),
        loss_fn=decoder_loss,
        optimizer=optax.sgd(1e-2),
        sample_batch=batch,
        mesh=jaxpar.MeshShape(data=1),
        zero=0,
        check_loss=False,
    )

    def seconds() -> float:
        began = time.process_time()
        float(engine.step(batch)["loss"])
        return time.process_time() - began

    seconds()
    needs: Any = engine.lower().compile().memory_analysis()
    return Way(seconds, needs.temp_size_in_bytes)


def measure(config: Config, remat: str) -> dict[str, Any]:
    """Median seconds of the layers, with all tokens and with half of them."""
    half = config.seq_len // 2
    drop = RandomLTD(start=half, steps=FOR_EVER, multiple=half)
    ways = {
        "whole": make_way(config, config.layers, remat, None),
        "half": make_way(config, config.layers, remat, drop),
        "one": make_way(config, 1, remat, None),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(config.steps):
        for name, way in ways.items():
            times[name].append(way.seconds())
    whole, less, one = (statistics.median(times[name]) for name in ways)
    others = one - (whole - one) / (config.layers - 1)
    return {
        "whole_cpu_ms": 1e3 * whole,
        "half_cpu_ms": 1e3 * less,
        "others_cpu_ms": 1e3 * others,
        "layers_share": (less - others) / (whole - others),
        "expected_share": 1 - (config.layers - 2) / config.layers / 2,
        "whole_temporaries_mb": ways["whole"].temporaries / 1e6,
        "half_temporaries_mb": ways["half"].temporaries / 1e6,
    }


def main(config: Config) -> None:
    """Measure with and without remat; print and record."""
    heads = "remat", "whole, CPU ms", "half", "layers' share", "of tokens", "MB"
    table, found = Table(*heads), {}
    for remat in ("full", "none"):
        own = found[f"remat_{remat}"] = measure(config, remat)
        table.add_row(
            remat,
            f"{own['whole_cpu_ms']:.0f}",
            f"{own['half_cpu_ms']:.0f}",
            f"{own['layers_share']:.1%}",
            f"{own['expected_share']:.1%}",
            f"{own['whole_temporaries_mb']:.0f}, {own['half_temporaries_mb']:.0f}",
        )
    Console().print(table)
    if config.write:
        print(write_result("random_ltd", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
