"""What do programs compiled for H200s that are not here hold and move?

Beside tests/compiled, which hold the closed forms: the figures that settings and
docstrings are based on. Needs the compilers (`.ci/setup --compilers yes`); no GPU.

    python benchmarks/compiled_gpu.py
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import GPT, GPTConfig, gpt_loss
from jaxpar.plan.deviceless import gpu_devices, prepare_process
from jaxpar.plan.program import read_program
from jaxpar.tree import num_elements

THRESHOLD = "xla_gpu_reduce_scatter_combine_threshold_bytes"
CASES: dict[str, dict[str, Any]] = {
    "scanned, stage 1": {"zero": 1},
    "scanned, stage 2": {"zero": 2},
    "scanned, stage 3": {"zero": 3},
    "unscanned, stage 3": {"zero": 3, "scan": False},
    "unscanned, stage 3, XLA's threshold": {
        "zero": 3,
        "scan": False,
        "options": {THRESHOLD: None},
    },
}


def measure(
    zero: int, scan: bool = True, options: dict[str, Any] | None = None
) -> dict[str, float]:
    """Compile a GPT of 12 layers of width 1024 for 64 H200s, in bf16."""
    config = GPTConfig(
        num_layers=12,
        num_heads=16,
        width=1024,
        seq_len=256,
        vocab_size=8192,
        remat="full",
        scan_layers=scan,
    )
    mesh = make_mesh(MeshShape(), gpu_devices("h200", 8, 8))
    engine = jaxpar.initialize(
        model=lambda rngs: GPT(config, rngs=rngs),
        loss_fn=gpt_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct((64, 257), jnp.int32)},
        mesh=mesh,
        zero=zero,
        precision="bf16",
        xla_options=options,
    )
    program = read_program(engine.lower().compile(), mesh)
    psi = num_elements(engine.state.params)
    scatters = [row for row in program.collectives if row.kind == "reduce-scatter"]
    return {
        "temporaries_bytes_per_parameter": program.memory.temporaries / psi,
        "peak_mb": program.memory.peak / 1e6,
        "gathered_bytes_per_parameter": program.crossing("all-gather") / psi,
        "scattered_bytes_per_parameter": program.crossing("reduce-scatter") / psi,
        "reduce_scatters": sum(row.count for row in scatters),
        "largest_reduce_scatter_mb": max(row.largest for row in scatters) / 1e6,
    }


def main() -> None:
    """Compile every case, print and write."""
    prepare_process()
    console = Console()
    measured = {}
    for name, case in CASES.items():
        measured[name] = measure(**case)
        console.print(f"compiled: {name}")
    table = Table("160M parameters, 64 H200s", *next(iter(measured.values())))
    for name, row in measured.items():
        table.add_row(name, *(f"{number:.2f}" for number in row.values()))
    console.print(table)
    console.print(f"written: {write_result('compiled_gpu', measured).name}")


if __name__ == "__main__":
    main()
