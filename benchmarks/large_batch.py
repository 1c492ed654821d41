"""What does a batch 32 times as large cost in held-out loss, with AdamW and with LAMB?

Trains the GPT of ``recipes/pretrain.py`` in a smaller form on the recipe's own text
and on CPU, every run on the same number of rows. Both optimizers are tuned at the small
batch, over ``--rates``; r is the best of these. Then both are tuned at the large batch,
over rates r * 32^(k/4): k = 2 is the rule of the square root, k = 4 the linear rule.
Where the best rate is at an end of a grid, the grid grows there, a small batch's by
factors of 2. Each rate is tried with each of ``--warmups``, and the best point over
``--seeds``.

What is found so far is written after each run, and a run that is there already, with
the same settings, is not done again: a stopped benchmark goes on.

    nice python benchmarks/large_batch.py
    python benchmarks/large_batch.py --rows 20480 --warmups 0.1
"""

import dataclasses
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import optax
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import RESULTS, write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.data import Loader, rows_of
from jaxpar.models import PRESETS
from jaxpar.optim import OPTIMIZERS, warmup_then
from recipes import pretrain

NAME = "large_batch"
TIMES = 32
"""By which the large batch is larger."""
NAMES = "adamw", "lamb"
CONSOLE = Console(soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, and how it is tuned."""

    batch: int = 8
    """Rows of the small batch."""
    rows: int = 20_480
    """That each run trains on: 2,560 small steps, 80 large ones."""
    width: int = 64
    """Of the model."""
    layers: int = 2
    """Of the model."""
    seq_len: int = 64
    """Tokens of a row."""
    vocab_size: int = 1024
    """Of the model."""
    rates: tuple[float, ...] = (5e-3, 1e-2, 2e-2)
    """Of the small batch: peaks, before a cosine decay."""
    warmups: tuple[float, ...] = (0.1, 0.3)
    """Linear warm-ups to try, as fractions of a run."""
    seeds: int = 3
    """Runs of a best point, with seeds from 0; a grid is tuned with seed 0."""


@dataclasses.dataclass(frozen=True)
class WarmedUp(pretrain.Config):
    """The recipe's settings, with a warm-up of any length."""

    warmup: float = 0.1

    def make_schedule(self, peak: float, steps: int) -> optax.Schedule:
        """See `pretrain.Config`."""
        warmup_steps = max(1, round(self.warmup * steps))
        return warmup_then("cosine", peak, steps=steps, warmup_steps=warmup_steps)


@dataclasses.dataclass(frozen=True)
class Point:
    """A run's settings, but for its seed."""

    optimizer: str
    times: int
    rate: float
    warmup: float

    def name(self, seed: int) -> str:
        """Of a run among the results."""
        return (
            f"{self.optimizer}, batch x {self.times}, rate {self.rate:.3g}, warm-up "
            f"{self.warmup:g}, seed {seed}"
        )


class Runs:
    """Runs by their points; those that are in the results are read.

    Args:
      config: what is trained.
    """

    def __init__(self, config: Config):
        self.config = config
        model = {"width": config.width, "num_layers": config.layers}
        model |= {"seq_len": config.seq_len, "vocab_size": config.vocab_size}
        self.sizes = model | {"batch": config.batch, "rows": config.rows}
        self.model = dataclasses.replace(PRESETS["1m"], num_heads=2, **model)
        path = RESULTS / f"{NAME}.json"
        known = json.loads(path.read_text())["measured"] if path.is_file() else {}
        self.found: dict[str, float] = (
            known["runs"] if known.get("sizes") == self.sizes else {}
        )

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        """The text to train on, and what is held out."""
        found, folder = pretrain.Config().open_data(pack=False), tempfile.mkdtemp()
        data, heldout, _ = found.for_run(Path(folder), self.model.vocab_size)
        return data, heldout

    def loss(self, point: Point, seed: int) -> float:
        """Held-out loss of a run, in nats a byte; infinite where it diverges."""
        name = point.name(seed)
        if name not in self.found:
            began = time.perf_counter()
            self.found[name] = round(self._train(point, seed), 4)
            write_result(NAME, {"sizes": self.sizes, "runs": self.found})
            took = time.perf_counter() - began
            CONSOLE.print(f"{name}: {self.found[name]:.4f} ({took:.0f} s)")
        return self.found[name]

    def _train(self, point: Point, seed: int) -> float:
        data, heldout = self.data
        size = self.config.batch * point.times
        steps = self.config.rows // size
        config = WarmedUp(
            model=self.model,
            batch_size=size,
            optimizer=OPTIMIZERS[point.optimizer],
            learning_rate=point.rate,
            warmup=point.warmup,
            steps=steps,
            seed=seed,
        )
        one = jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1])
        engine = pretrain.build(config, one)
        rows = functools.partial(rows_of, seq_len=self.config.seq_len, pack=False)
        loader = Loader(rows(data), batch_size=size, seed=seed)
        for _, batch in zip(range(steps), loader, strict=False):
            engine.step(batch)
        # The same rows for every batch: 1,024, or all that there are.
        each = self.config.batch * TIMES
        own = Loader(rows(heldout), batch_size=each, repeat=False, num_batches=4)
        return jaxpar.mean_loss(engine, own) * len(heldout) / heldout.num_bytes


def best_of(points: list[Point], runs: Runs) -> Point:
    """The point of the least loss, with seed 0."""
    return min(points, key=lambda point: _finite(runs.loss(point, 0)))


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def tuned(of: Callable[[int], list[Point]], ends: tuple[int, int], runs: Runs) -> Point:
    """The best point of a grid, which grows where its best rate is at an end."""
    low, high = ends
    while True:
        best = best_of([x for k in range(low, high + 1) for x in of(k)], runs)
        if best in of(low):
            low -= 1
        elif best in of(high):
            high += 1
        else:
            return best


def main(config: Config) -> None:
    """Tune both at both batches, run the best over seeds; print and record."""
    runs = Runs(config)
    best: dict[tuple[str, int], Point] = {}
    for name in NAMES:

        def small(k: int, name: str = name) -> list[Point]:
            inside = min(max(k, 0), len(config.rates) - 1)
            rate = config.rates[inside] * 2.0 ** (k - inside)
            return [Point(name, 1, rate, warmup) for warmup in config.warmups]

        base = best[name, 1] = tuned(small, (0, len(config.rates) - 1), runs)

        def large(k: int, base: Point = base) -> list[Point]:
            rate = base.rate * TIMES ** (k / 4)
            return [
                dataclasses.replace(base, times=TIMES, rate=rate, warmup=warmup)
                for warmup in config.warmups
            ]

        best[name, TIMES] = tuned(large, (0, 4), runs)
    losses = {
        key: [runs.loss(point, seed) for seed in range(config.seeds)]
        for key, point in best.items()
    }
    summary = summarise(best, losses)
    measured = {"sizes": runs.sizes, "summary": summary, "runs": runs.found}
    write_result(NAME, measured)
    CONSOLE.print(table(summary, config))
    CONSOLE.print(verdict(summary))


def summarise(
    best: dict[tuple[str, int], Point], losses: dict[tuple[str, int], list[float]]
) -> dict[str, Any]:
    """Best points, their losses, and what the larger batch adds."""
    found = {}
    least = min(statistics.mean(losses[name, 1]) for name in NAMES)
    for (name, times), point in best.items():
        mean = statistics.mean(losses[name, times])
        found[f"{name}, batch x {times}"] = {
            "rate": float(f"{point.rate:.3g}"),
            "warmup": point.warmup,
            "losses": losses[name, times],
            "mean": round(mean, 4),
            "beside_own_small_batch": round(mean / statistics.mean(losses[name, 1]), 4),
            "beside_best_small_batch": round(mean / least, 4),
        }
    return found


def table(summary: dict[str, Any], config: Config) -> Table:
    """A row for each best point."""
    found = Table("", "rate", "warm-up", "mean", "lowest to highest", "gap", "to best")
    found.title = f"held out, nats a byte; {config.rows:,} rows each"
    for name, own in summary.items():
        losses = own["losses"]
        found.add_row(
            name,
            f"{own['rate']:g}",
            f"{own['warmup']:.0%}",
            f"{own['mean']:.4f}",
            f"{min(losses):.4f} to {max(losses):.4f}",
            f"{own['beside_own_small_batch'] - 1:+.1%}",
            f"{own['beside_best_small_batch'] - 1:+.1%}",
        )
    return found


def verdict(summary: dict[str, Any]) -> str:
    """LAMB beside AdamW at the large batch."""
    adamw, lamb = (summary[f"{name}, batch x {TIMES}"]["mean"] for name in NAMES)
    said = "not worse" if lamb <= adamw else "WORSE"
    return f"LAMB beside AdamW at {TIMES} x the batch: {lamb / adamw - 1:+.2%}, {said}"


if __name__ == "__main__":
    main(parse(Config, __doc__))
