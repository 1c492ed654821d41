"""Which communication does a step on absent H200s wait for, by its compiled schedule?

Needs the compilers (`.ci/setup --compilers yes`); no GPU. Rates are assumed, nothing is
measured: "table" is jaxpar/compiled/devices/h200.toml, "round" is 370 GB/s of links,
4.3 TB/s of memory, 650 TFLOP/s of matmuls, 450 of attention and 2 µs a launch.

    python benchmarks/exposed_gpu.py                    # all cases and options; writes
    python benchmarks/exposed_gpu.py --case zero3       # one case
    python benchmarks/exposed_gpu.py --options zero3    # XLA's options, on and off
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.exposed import Communication, read_communication
from jaxpar.compiled.hardware import load_hardware
from jaxpar.compiled.hlo import parse as parse_program
from jaxpar.compiled.kernel_time import Rates, rates_of
from jaxpar.compiled.link_rates import LinkRates, link_rates_of
from jaxpar.compiled.xla_flags import Value
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import gpt_loss, make_gpt
from jaxpar.models.gpt.presets import gpt_config
from jaxpar.planner.absent_devices import gpu_devices, prepare_process

GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of the 7B shape with full remat, in bf16, on rows of 4,096 tokens.

    Attributes:
      mesh: devices by axis.
      zero: the ZeRO stage.
      rows: of the global batch.
      accumulate: micro-batches.
      schedule: of the pipeline.
    """

    mesh: MeshShape
    zero: int
    rows: int = 64
    accumulate: int = 1
    schedule: str = "1f1b"


CASES = {
    "zero1": Case(MeshShape(64), 1),
    "zero2": Case(MeshShape(64), 2),
    "zero3": Case(MeshShape(64), 3),
    "replica-zero1": Case(MeshShape(8, replica=64), 1, rows=512),
    "replica-zero3": Case(MeshShape(8, replica=64), 3, rows=512),
    "tensor4": Case(MeshShape(16, tensor=4), 1),
    "pipe8": Case(MeshShape(8, pipe=8), 1, accumulate=8),
}

ROUND = Rates(4.3e12, {"bfloat16": 650e12, "float32": 650e12}, 450e12, launch=2e-6)
ROUND_LINKS = 370e9

OPTIONS: dict[str, dict[str, Value | None]] = {
    "as jaxpar sets them": {},
    "without the threshold of reduce-scatters": {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": None
    },
    "without the latency-hiding scheduler": {
        "xla_gpu_enable_latency_hiding_scheduler": False
    },
}


def compile_step(case: Case, options: dict[str, Value | None] | None = None) -> str:
    """Compile a case's step; return the program's text."""
    config = gpt_config("7b", remat="full")
    num_devices = case.mesh.num_devices
    assert num_devices is not None, "cases say all sizes"
    devices = gpu_devices("h200", num_devices // GPUS_PER_HOST, GPUS_PER_HOST)
    rows = jax.ShapeDtypeStruct((case.rows, config.seq_len + 1), jnp.int32)
    engine = jaxpar.initialize(
        model=make_gpt(config),
        loss_fn=gpt_loss,
        optimizer=optax.adamw(1e-4),
        sample_batch={"tokens": rows},
        mesh=make_mesh(case.mesh, devices),
        zero=case.zero,
        precision="bf16",
        accumulate=case.accumulate,
        schedule=case.schedule,
        xla_options=options,
    )
    return engine.lower().compile().as_text() or ""


def read(text: str, case: Case, rates: Literal["table", "round"]) -> Communication:
    """Time a program's collectives."""
    hardware, sizes = load_hardware("h200"), case.mesh.axes
    links, own = link_rates_of(hardware, sizes, GPUS_PER_HOST), rates_of(hardware)
    if rates == "round":
        links = LinkRates(sizes, GPUS_PER_HOST, ROUND_LINKS, ROUND_LINKS)
        own = ROUND
    return read_communication(parse_program(text), own, links)


def as_row(found: Any, kernels: float) -> dict[str, float]:
    """Numbers of one line."""
    return {
        "count": found.count,
        "sync": found.num_sync,
        "mb": found.sent_bytes / 1e6,
        "wire_ms": 1e3 * found.wire_seconds,
        "exposed_ms": 1e3 * found.exposed_seconds,
        "kernels_ms": 1e3 * kernels,
    }


def rows_of(found: Communication) -> dict[str, dict[str, float]]:
    """A line for each kind of collective, and one for all."""
    rows = {
        f"{row.kind} over {' x '.join(row.axes) or 'no axis'}": as_row(
            row, found.kernel_seconds
        )
        for row in found.by_kind
    }
    lines = list(rows.values())
    rows["all"] = {name: sum(line[name] for line in lines) for name in lines[0]}
    rows["all"]["kernels_ms"] = 1e3 * found.kernel_seconds
    return rows


def show(console: Console, title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print a table."""
    columns = list(next(iter(rows.values())))
    table = Table(title=title)
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        cells = (
            f"{n:,.1f}" if isinstance(n, float) else f"{n:,}" for n in row.values()
        )
        table.add_row(name, *cells)
    console.print(table)


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    case: str | None = None
    """One of the cases; by default all, then options, and the results are written."""
    options: str | None = None
    """A case to compile with and without each of XLA's options."""
    rates: Literal["table", "round"] | None = None
    """One of the two sets of rates; both by default."""
    save: str | None = None
    """A file to write the program of `case` to."""


def measure_case(name: str, config: Config, console: Console) -> dict[str, Any]:
    """Compile a case, print its tables."""
    case, began = CASES[name], time.perf_counter()
    text = compile_step(case)
    seconds = time.perf_counter() - began
    console.print(f"{name}: {case}, compiled in {seconds:.0f} s", highlight=False)
    if config.save:
        Path(config.save).write_text(text, encoding="utf-8")
    found = {}
    for rates in (config.rates,) if config.rates else ("table", "round"):
        found[rates] = rows_of(read(text, case, rates))
        show(console, f"{name}, {rates} rates", found[rates])
    return found


def measure_options(name: str, config: Config, console: Console) -> dict[str, Any]:
    """Compile a case with each set of options, print one table."""
    rows = {}
    for said, options in OPTIONS.items():
        text = compile_step(CASES[name], dict(options))
        found = read(text, CASES[name], config.rates or "table")
        rows[said] = rows_of(found)["all"]
        rows[said]["saved_ms"] = (
            rows[said]["exposed_ms"] - rows["as jaxpar sets them"]["exposed_ms"]
        )
    show(console, f"options of XLA, {name}", rows)
    return rows


def main(config: Config) -> None:
    """Compile, print and write."""
    prepare_process()
    console = Console()
    if config.case:
        measure_case(config.case, config, console)
    if config.options:
        measure_options(config.options, config, console)
    if config.case or config.options:
        return
    found: dict[str, Any] = {}
    for name in CASES:
        found[name] = measure_case(name, config, console)
    for name in ("zero1", "zero3"):
        found[f"options, {name}"] = measure_options(name, config, console)
    console.print(f"written: {write_result('exposed_gpu', found).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
