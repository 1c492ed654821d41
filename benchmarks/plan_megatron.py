"""Does a plan say what Megatron-LM measured? Its ten models, planned for A100s.

Every row is planned with benchmarks/megatron_gpt.py on the row's GPUs: tensor and pipe
as there, every layer run again, attention's scores written, 1F1B, bf16. Nothing is
fitted: the error is what the rates of `jaxpar.compiled.hardware` and the compiled step
give. Needs the compilers (`.ci/setup --compilers yes`); no GPU.

    python benchmarks/plan_megatron.py
    python benchmarks/plan_megatron.py --rows 1.7b 39.1b

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", table 1 and equation 3.
"""

import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.hardware import load_hardware
from jaxpar.models.decoder.presets import decoder_config
from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import plan_in_subprocess
from jaxpar.planner.roofline import Estimate
from jaxpar.planner.subprocess import CompilerProcessError

RECIPE = Path(__file__).resolve().parent / "megatron_gpt.py"
GPUS_PER_HOST = 8
A100 = load_hardware("a100")
PEAK = A100.peak["bfloat16"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of Megatron's table.

    Attributes:
      model: our preset.
      billions: parameters, in 1e9.
      model_parallel: GPUs that hold one copy of the model.
      gpus: all of them.
      batch: rows of the global batch.
      teraflops: measured on each GPU, operations of recomputation counted.
    """

    model: str
    billions: float
    model_parallel: int
    gpus: int
    batch: int
    teraflops: float

    @property
    def mesh(self) -> dict[str, int]:
        """Tensor fills a host, then come pipeline stages, then copies."""
        tensor = min(GPUS_PER_HOST, self.model_parallel)
        pipe = self.model_parallel // tensor
        return {
            "data": self.gpus // self.model_parallel,
            "pipe": pipe,
            "tensor": tensor,
        }

    @property
    def flops(self) -> float:
        """Of a step, by Megatron's equation 3: a layer's forward runs twice."""
        own = decoder_config(self.model)
        per_layer = 96 * self.batch * own.seq_len * own.width**2
        attention = own.seq_len / (6 * own.width)
        head = own.vocab_size / (16 * own.num_layers * own.width)
        return own.num_layers * per_layer * (1 + attention + head)

    @property
    def measured(self) -> float:
        """Fraction of the peak."""
        return self.teraflops * 1e12 / PEAK


ROWS = (
    Row("1.7b", 1.7, 1, 32, 512, 137),
    Row("3.6b", 3.6, 2, 64, 512, 138),
    Row("7.5b", 7.5, 4, 128, 512, 142),
    Row("18.4b", 18.4, 8, 256, 1024, 135),
    Row("39.1b", 39.1, 16, 512, 1536, 138),
    Row("76.1b", 76.1, 32, 1024, 1792, 140),
    Row("145.6b", 145.6, 64, 1536, 2304, 148),
    Row("310.1b", 310.1, 128, 1920, 2160, 155),
    Row("529.6b", 529.6, 280, 2520, 2520, 163),
    Row("1008b", 1008.0, 512, 3072, 3072, 163),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What is planned."""

    rows: tuple[str, ...] = ()
    """Models, such as 1.7b 39.1b; all, and the result is written, if none is named."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A row's plan, and what was chosen for it where the table leaves it open."""

    row: Row
    microbatch: int
    plan: Plan

    @property
    def estimate(self) -> Estimate:
        """The plan's."""
        assert self.plan.estimate is not None, "GPUs have rates"
        return self.plan.estimate

    @property
    def predicted(self) -> float:
        """Fraction of the peak, by Megatron's count of operations."""
        return self.row.flops / self.estimate.step_seconds / self.row.gpus / PEAK

    @property
    def error(self) -> float:
        """Of the prediction, of what was measured."""
        return self.predicted / self.row.measured - 1

    def as_dict(self) -> dict[str, Any]:
        """What is recorded, as JSON's types."""
        plan = self.plan
        return {
            "parameters": plan.num_params,
            "mesh": dict(plan.mesh),
            "zero": plan.zero,
            "rows_of_a_microbatch": self.microbatch,
            "fits": plan.fits,
            "peak_gb": plan.memory.peak / 1e9,
            "measured_of_peak": self.row.measured,
            "predicted_of_peak": self.predicted,
            "error": self.error,
            "flops_by_megatron": self.row.flops,
            "flops_of_the_program": plan.flops_per_step,
            "estimate": dataclasses.asdict(self.estimate),
            "compile_seconds": plan.compile_seconds,
        }


def choices(row: Row) -> Iterator[tuple[int, int]]:
    """ZeRO stage and rows of a micro-batch on a device, the preferred ones first.

    Megatron shards no optimizer state: stage 0, and 1 where that is too large. A
    pipeline takes single rows, for the least bubble; others as many as fit.
    """
    own = row.batch // row.mesh["data"]
    sizes = [1] if row.mesh["pipe"] > 1 else [b for b in (8, 4, 2, 1) if own % b == 0]
    for zero in (0, 1):
        for microbatch in sizes:
            yield zero, microbatch


def plan_row(row: Row) -> Planned:
    """Plan a row: the first choice that fits, or the last."""
    found = None
    for zero, microbatch in choices(row):
        accumulate = row.batch // row.mesh["data"] // microbatch
        flags = ["--model", row.model, "--accumulate", str(accumulate)]
        flags += ["--zero", str(zero), "--batch-size", str(row.batch)]
        for axis, size in row.mesh.items():
            flags += [f"--mesh.{axis}", str(size)]
        target = f"a100:{row.gpus // GPUS_PER_HOST}x{GPUS_PER_HOST}"
        plan = plan_in_subprocess(RECIPE, target, flags)
        found = Planned(row, microbatch, plan)
        if plan.fits:
            break
    assert found is not None, "there is a choice for every row"
    return found


def make_table(planned: Sequence[Planned]) -> Table:
    """Lay prediction and measurement side by side; where a step's time goes, in %."""
    whole = f"GB of {A100.memory_bytes / 1e9:.0f}"
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in (
        *("1e9 (theirs)", "mesh", "ZeRO", "rows", whole, "fits"),
        *("measured", "predicted", "ratio", "error"),
        *("products", "memory", "links", "bubble", "compiled"),
    ):
        table.add_column(name, justify="right")
    for each in planned:
        plan, found = each.plan, each.estimate
        parts = (
            found.matmul_seconds,
            found.memory_seconds,
            found.exposed_seconds,
            found.bubble_seconds,
        )
        table.add_row(
            f"{plan.num_params / 1e9:.1f} ({each.row.billions})",
            " x ".join(str(size) for size in plan.mesh.values()),
            str(plan.zero),
            str(each.microbatch),
            f"{plan.memory.peak / 1e9:.1f}",
            "yes" if plan.fits else "no",
            f"{each.row.measured:.1%}",
            f"{each.predicted:.1%}",
            f"{each.predicted / each.row.measured:.2f}",
            f"{each.error:+.0%}",
            *(f"{part / found.step_seconds:.0%}" for part in parts),
            f"{plan.compile_seconds:.0f} s",
        )
    return table


READING = """\
1e9: parameters. mesh: data x pipe x tensor. rows: of a micro-batch on a device; 1 in
pipelines, else the most of 8 that fit. measured, predicted: of the peak of {peak:.0f}
TFLOP/s, both by Megatron's count of operations, so that the ratio is one of times. Then
what the predicted step is made of: products, all other kernels at the memory's rate,
links that are waited for, the pipeline's idle time. Nothing is fitted.
Too fast: every product runs at the rate of the largest, and no kernel takes time to
start. Too slow: Megatron's fused kernels pass less through memory, and its vocabulary
is not split over pipe, for which ours pays two all-reduces a micro-batch."""


def main(config: Config) -> None:
    """Plan the rows, print the table, write it if it is whole."""
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=150, highlight=False)
    unknown = set(config.rows) - {row.model for row in ROWS}
    if unknown:
        known = ", ".join(row.model for row in ROWS)
        raise SystemExit(f"--rows {' '.join(sorted(unknown))}: must be of {known}.")
    planned, failed = [], {}
    for row in ROWS:
        if config.rows and row.model not in config.rows:
            continue
        with console.status(f"compiling {row.model} for {row.gpus:,} A100s"):
            try:
                planned.append(plan_row(row))
            except (CompilerProcessError, ValueError) as error:
                failed[row.model] = str(error)
                console.print(f"{row.model} failed: {error}", markup=False)
    if planned:
        console.print(make_table(planned))
        console.print(READING.format(peak=PEAK / 1e12))
        for note in dict.fromkeys(each.plan.notes[0] for each in planned):
            console.print(f"note: {note}")
        errors = [abs(each.error) for each in planned]
        mean = statistics.mean(errors)
        console.print(f"mean error {mean:.1%}, of {len(errors)} rows")
    if not config.rows:
        rows = {each.row.model: each.as_dict() for each in planned}
        path = write_result("plan_megatron", {"rows": rows, "failed": failed})
        console.print(f"written: {path.name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
