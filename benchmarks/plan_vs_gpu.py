"""Is the predicted peak memory what a GPU then needs? The mark: within 5 %.

Three configurations of recipes/gpt.py on one GPU, each in a process of its own: the
peak of the compiled step, as it runs there, against the most bytes in use that the GPU
counts over four steps, and the step's time against the estimate. Without a GPU the
steps are planned for an H200, and nothing is compared.

    python benchmarks/plan_vs_gpu.py
"""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.program import read_program
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.planner.recipe import load_recipe, plan_in_subprocess

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "gpt.py"
CASES: dict[str, tuple[str, ...]] = {
    "124m": ("--model", "124m", "--batch-size", "16", "--remat", "none"),
    "350m": ("--model", "350m", "--batch-size", "16", "--remat", "dots"),
    "1.3b": ("--model", "1.3b", "--batch-size", "8", "--remat", "full"),
}
COMMON = ("--precision", "bf16", "--zero", "1")
STEPS = 4
KINDS = {"A100": "a100", "H100": "h100", "H200": "h200", "B200": "b200"}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    case: str = ""
    """124m, 350m or 1.3b: measure it in this process, and print JSON; empty: all."""


def measure(case: str) -> dict[str, float]:
    """Compile and run one configuration on this process's GPU."""
    recipe = load_recipe(RECIPE)
    config = parse(recipe.Config, None, [*CASES[case], *COMMON])
    device = jax.devices()[0]
    engine = recipe.build(config, make_mesh(MeshShape(data=1), [device]))
    program = read_program(engine.lower().compile(), engine.mesh)
    before = device.memory_stats()["peak_bytes_in_use"]
    spec = engine.batch_spec.structs()["tokens"]
    tokens = np.random.default_rng(0).integers(0, 1000, spec.shape, dtype=np.int32)
    engine.step({"tokens": tokens})
    engine.wait()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step({"tokens": tokens})
    engine.wait()
    return {
        "step_seconds": (time.perf_counter() - began) / STEPS,
        "predicted_bytes": program.memory.peak,
        "measured_bytes": device.memory_stats()["peak_bytes_in_use"],
        "initialisation_bytes": before,
    }


def planned(case: str, kind: str) -> dict[str, Any]:
    """Plan one configuration for a GPU of a kind."""
    plan = plan_in_subprocess(RECIPE, f"{kind}:1x1", (*CASES[case], *COMMON))
    assert plan.estimate is not None, "GPUs have rates"
    return {
        "planned_bytes": plan.memory.peak,
        "estimated_seconds": plan.estimate.step_seconds,
    }


def measured_apart(case: str) -> dict[str, float]:
    """Measure in a process of its own, for peaks are of the process."""
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_table(found: dict[str, dict[str, Any]]) -> Table:
    """What was planned, and what was measured of it."""
    table = Table("", box=box.SIMPLE)
    names = ("planned GB", "predicted GB", "measured GB", "error", "estimate", "step")
    for name in names:
        table.add_column(name, justify="right")
    for case, row in found.items():
        cells = [f"{row['planned_bytes'] / 1e9:.2f}", "-", "-", "-"]
        if "measured_bytes" in row:
            cells[1] = f"{row['predicted_bytes'] / 1e9:.2f}"
            cells[2] = f"{row['measured_bytes'] / 1e9:.2f}"
            cells[3] = f"{row['predicted_bytes'] / row['measured_bytes'] - 1:+.1%}"
        cells.append(f"{row['estimated_seconds'] * 1e3:.0f} ms")
        step = row.get("step_seconds")
        cells.append(f"{step * 1e3:.0f} ms" if step else "-")
        table.add_row(case, *cells)
    return table


def gpu_kind() -> str | None:
    """The kind of the GPU that is here; None where none is."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return next((kind for name, kind in KINDS.items() if name in done.stdout), None)


def main(config: Config) -> None:
    """Measure, print, and write where a GPU was at hand."""
    if config.case:
        print(json.dumps(measure(config.case)))
        return
    console = Console()
    kind = gpu_kind()
    if kind is None:
        console.print("no GPU is here: planned for an H200, and nothing is measured")
    found: dict[str, dict[str, Any]] = {}
    for case in CASES:
        measured = measured_apart(case) if kind else {}
        try:
            own = planned(case, kind or "h200")
        except RuntimeError as error:  # A machine that runs may lack the compilers.
            console.print(f"{case} is not planned: {error}")
            continue
        found[case] = own | measured
    console.print(make_table(found))
    if kind:
        console.print(write_result("plan_vs_gpu", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
