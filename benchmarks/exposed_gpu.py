"""Which communication does a step on absent H200s wait for, by its compiled schedule?

Needs the compilers (`.ci/setup --compilers yes`); no GPU. Rates are assumed, nothing is
measured: "table" is jaxpar/compiled/devices/h200.toml, "round" is 370 GB/s of links,
4.3 TB/s of memory, 650 TFLOP/s of matmuls, 450 of attention and 2 µs a launch.

    python benchmarks/exposed_gpu.py                    # all of it; writes the results
    python benchmarks/exposed_gpu.py --case zero3       # one case
    python benchmarks/exposed_gpu.py --options zero3    # XLA's options, on and off
    python benchmarks/exposed_gpu.py --plans 1.3b       # by rule and by schedule
"""

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.plan_search import CASES as SEARCHES
from benchmarks.plan_search import RECIPE, SETS
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.exposed import Communication, Exposed, read_communication
from jaxpar.compiled.hardware import load_hardware
from jaxpar.compiled.hlo import Module
from jaxpar.compiled.hlo import parse as parse_program
from jaxpar.compiled.kernel_time import Rates, rates_of
from jaxpar.compiled.link_rates import LinkRates, link_rates_of
from jaxpar.compiled.program import read_program
from jaxpar.compiled.xla_flags import Value
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import decoder_loss, make_decoder
from jaxpar.models.decoder.presets import decoder_config
from jaxpar.planner.absent_devices import gpu_devices, prepare_process
from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import plan_in_subprocess
from jaxpar.planner.roofline import exposed_by_rule
from jaxpar.planner.targets import parse_target

GPUS_PER_HOST = 8
MS = 1e3
Row = dict[str, float]
Assumed = Literal["table", "round"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of the 7B shape with full remat, in bf16, on rows of 4,096 tokens.

    Attributes:
      mesh: devices by axis.
      zero: the ZeRO stage.
      rows: of the global batch.
      accumulate: micro-batches.
      two_batches: as in `jaxpar.initialize`.
    """

    mesh: MeshShape
    zero: int
    rows: int = 64
    accumulate: int = 1
    two_batches: bool | None = None


CASES = {
    "zero1": Case(MeshShape(64), 1),
    "zero2": Case(MeshShape(64), 2),
    "zero3": Case(MeshShape(64), 3),
    "replica-zero1": Case(MeshShape(8, replica=64), 1, rows=512),
    "replica-zero3": Case(MeshShape(8, replica=64), 3, rows=512),
    "tensor4": Case(MeshShape(16, tensor=4), 1),
    "tensor4-zero3": Case(MeshShape(16, tensor=4), 3),
    "tensor4-whole": Case(MeshShape(16, tensor=4), 1, two_batches=False),
    "pipe8": Case(MeshShape(8, pipe=8), 1, accumulate=8),
}

CaseName = Literal[
    "zero1",
    "zero2",
    "zero3",
    "replica-zero1",
    "replica-zero3",
    "tensor4",
    "tensor4-zero3",
    "tensor4-whole",
    "pipe8",
]

ROUND = Rates(4.3e12, {"bfloat16": 650e12, "float32": 650e12}, 450e12, launch=2e-6)
ROUND_LINKS = 370e9

SET = (
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_enable_while_loop_double_buffering",
)
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
AS_SET = "as jaxpar sets them"
OPTIONS: dict[str, dict[str, Value | None]] = {
    AS_SET: {},
    **{f"{option} of XLA": {option: None} for option in SET},
    "xla_gpu_enable_latency_hiding_scheduler off": {
        "xla_gpu_enable_latency_hiding_scheduler": False
    },
    "xla_gpu_pipeline_all_gather and _reduce_scatter on": {
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_pipeline_reduce_scatter": "COLLECTIVE_PIPELINING_MODE_ON",
    },
    **{f"{LIMIT} {number}": {LIMIT: number} for number in (2, 4)},
}
"""What jaxpar sets, without each of it; then XLA's own settings that schedule."""


def compile_step(case: Case, options: Mapping[str, Value | None]) -> tuple[Module, int]:
    """Compile a case's step; return its program, and bytes of its temporaries."""
    config = decoder_config("7b", remat="full")
    num_devices = case.mesh.num_devices
    assert num_devices is not None, "cases say all sizes"
    devices = gpu_devices("h200", num_devices // GPUS_PER_HOST, GPUS_PER_HOST)
    mesh = make_mesh(case.mesh, devices)
    rows = jax.ShapeDtypeStruct((case.rows, config.seq_len + 1), jnp.int32)
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-4),
        sample_batch={"tokens": rows},
        mesh=mesh,
        zero=case.zero,
        precision="bf16",
        accumulate=case.accumulate,
        xla_options=dict(options),
        two_batch_overlap=case.two_batches,
    )
    compiled = engine.lower().compile()
    module = parse_program(
        compiled.as_text() or "", engine.spec.execution.active_fraction
    )
    return module, read_program(compiled, mesh, module).memory.temporaries


def read(program: Module, case: Case, assumed: Assumed) -> Communication:
    """Time a program's collectives."""
    hardware, sizes = load_hardware("h200"), case.mesh.axes
    links, rates = link_rates_of(hardware, sizes, GPUS_PER_HOST), rates_of(hardware)
    if assumed == "round":
        links = LinkRates(sizes, GPUS_PER_HOST, ROUND_LINKS, ROUND_LINKS)
        rates = ROUND
    return read_communication(program, rates, links)


def row_of(found: Exposed) -> Row:
    """The numbers of one kind of collective."""
    return {
        "count": found.count,
        "sync": found.num_sync,
        "sent_mb": found.sent_bytes / 1e6,
        "wire_ms": MS * found.wire_seconds,
        "exposed_ms": MS * found.exposed_seconds,
    }


def rows_of(found: Communication) -> dict[str, Row]:
    """A row for each kind of collective, and one for all."""
    rows = {
        f"{row.kind} over {' x '.join(row.axes) or 'no axis'}": row_of(row)
        for row in found.by_kind
    }
    lines = list(rows.values())
    together = {name: sum(line[name] for line in lines) for name in lines[0]}
    return {**rows, "all": {**together, "kernels_ms": MS * found.kernel_seconds}}


def show(console: Console, title: str, rows: Mapping[str, Row]) -> None:
    """Print a table."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table(title=title)
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        cells = (f"{row[each]:,.1f}" if each in row else "" for each in columns)
        table.add_row(name, *cells)
    console.print(table)


def measure_case(name: str, console: Console) -> dict[str, dict[str, Row]]:
    """What a case exposes, at both sets of rates."""
    case, began = CASES[name], time.perf_counter()
    program, _ = compile_step(case, {})
    seconds = time.perf_counter() - began
    console.print(f"{name}: {case}; compiled in {seconds:.0f} s", highlight=False)
    both: tuple[Assumed, ...] = ("table", "round")
    found = {assumed: rows_of(read(program, case, assumed)) for assumed in both}
    for assumed, rows in found.items():
        show(console, f"{name}, {assumed} rates", rows)
    return found


def measure_options(name: str, console: Console) -> dict[str, Row]:
    """What a case exposes with each set of options, and what jaxpar's save beside it.

    At the rates of the table.
    """
    rows: dict[str, Row] = {}
    for said, options in OPTIONS.items():
        program, temporaries = compile_step(CASES[name], options)
        rows[said] = rows_of(read(program, CASES[name], "table"))["all"]
        saved = rows[said]["exposed_ms"] - rows[AS_SET]["exposed_ms"]
        rows[said] |= {"jaxpar_saves_ms": saved, "temporaries_gb": temporaries / 1e9}
    show(console, f"options of XLA, {name}", rows)
    return rows


def compare(plan: Plan) -> Row:
    """A plan's step by the schedule, and as it would be by the rule."""
    found, target = plan.estimate, parse_target(plan.target)
    assert found is not None, "targets are GPUs"
    assert target.hardware is not None, "targets are GPUs"
    links = link_rates_of(target.hardware, plan.mesh, target.devices_per_host)
    beside = found.matmul_seconds + found.memory_seconds
    _, by_rule = exposed_by_rule(plan.program.collectives, plan.zero, links, beside)
    rest = found.step_seconds - found.exposed_seconds
    return {
        "wire_ms": MS * found.links_seconds,
        "exposed_by_rule_ms": MS * by_rule,
        "exposed_ms": MS * found.exposed_seconds,
        "step_by_rule_ms": MS * (rest + by_rule),
        "step_ms": MS * found.step_seconds,
    }


def measure_plans(name: str, console: Console) -> dict[str, Row]:
    """Step times of benchmarks/plan_search.py's picks, by the rule and by schedules."""
    target, batch, picked = SEARCHES[name]
    flags = ("--model", name, "--precision", "bf16", "--batch-size", str(batch))
    rows = {}
    for choice in picked:
        plan = plan_in_subprocess(RECIPE, target, (*flags, *choice.flags(SETS)))
        rows[str(choice)] = compare(plan)
    show(console, f"plans of {name} on {target}", rows)
    return rows


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile: everything, and the results are written, if none is named."""

    case: CaseName | None = None
    """One of the cases."""
    options: CaseName | None = None
    """A case to compile with and without each of XLA's options."""
    plans: Literal["1.3b", "70b"] | None = None
    """A model of benchmarks/plan_search.py, whose picks are planned."""


def main(config: Config) -> None:
    """Compile, print and write."""
    prepare_process()
    console = Console(width=150)
    named = (config.case, measure_case), (config.options, measure_options)
    for name, measure in (*named, (config.plans, measure_plans)):
        if name:
            measure(name, console)
    if config.case or config.options or config.plans:
        return
    found: dict[str, Any] = {name: measure_case(name, console) for name in CASES}
    found["options, zero3"] = measure_options("zero3", console)
    found["plans of 1.3b"] = measure_plans("1.3b", console)
    console.print(f"written: {write_result('exposed_gpu', found).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
