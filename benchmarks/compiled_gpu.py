"""What do programs compiled for H200s that are not here hold and move?

Beside tests/compiled, which hold the closed forms: the figures that settings and
docstrings are based on. Needs the compilers (`.ci/setup --compilers yes`); no GPU.

    python benchmarks/compiled_gpu.py
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.compiled.program import read_program
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.remat import remat
from jaxpar.models import GPTConfig, gpt_loss, make_gpt
from jaxpar.models.gpt.embed_head import Embed, Head
from jaxpar.models.gpt.model import Block
from jaxpar.planner.absent_devices import gpu_devices, prepare_process
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


class Unscanned(nnx.Module):
    """A GPT as users write their models: a module a layer, called one by one."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.embed, self.head = Embed(config, rngs=rngs), Head(config, rngs=rngs)
        self.head.logits = self.embed.embedding
        layers = range(config.num_layers)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in layers])

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Predict each next token."""
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            graphdef, state = nnx.split(block)
            run = remat(lambda state, x, own=graphdef: nnx.merge(own, state)(x), "full")
            x_BTD = run(state, x_BTD)
        return self.head(x_BTD)


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
    )
    mesh = make_mesh(MeshShape(), gpu_devices("h200", 8, 8))
    engine = jaxpar.initialize(
        model=make_gpt(config) if scan else lambda rngs: Unscanned(config, rngs=rngs),
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
        "gathered_bytes_per_parameter": program.communicated_bytes("all-gather") / psi,
        "scattered_bytes_per_parameter": program.communicated_bytes("reduce-scatter")
        / psi,
        "reduce_scatters": sum(row.count for row in scatters),
        "largest_reduce_scatter_mb": max(row.largest for row in scatters) / 1e6,
    }


def measure_pipeline(schedule: str) -> dict[str, float]:
    """Compile 175 billion parameters for 512 H200s: data 8 x pipe 16 x tensor 4."""
    config = GPTConfig(
        num_layers=96,
        num_heads=96,
        width=12_288,
        seq_len=2048,
        vocab_size=51_200,
        remat="full",
    )
    mesh = make_mesh(MeshShape(8, 16, 4), gpu_devices("h200", 64, 8))
    began = time.perf_counter()
    engine = jaxpar.initialize(
        model=make_gpt(config),
        loss_fn=gpt_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct((8 * 32, 2049), jnp.int32)},
        mesh=mesh,
        zero=1,
        precision="bf16",
        accumulate=32,
        schedule=schedule,
    )
    program = read_program(engine.lower().compile(), mesh)
    return {
        "compiled_in_seconds": time.perf_counter() - began,
        "state_gb": program.bytes_of("state") / 1e9,
        "temporaries_gb": program.memory.temporaries / 1e9,
        "peak_gb": program.memory.peak / 1e9,
        "sent_over_pipe_gb": program.communicated_bytes("collective-permute", "pipe")
        / 1e9,
    }


def show(console: Console, title: str, measured: dict[str, dict[str, float]]) -> None:
    """Print a table."""
    table = Table(title, *next(iter(measured.values())))
    for name, row in measured.items():
        table.add_row(name, *(f"{number:.2f}" for number in row.values()))
    console.print(table)


def main() -> None:
    """Compile every case, print and write."""
    prepare_process()
    console = Console()
    measured = {}
    for name, case in CASES.items():
        measured[name] = measure(**case)
        console.print(f"compiled: {name}")
    show(console, "160M parameters, 64 H200s", measured)
    pipelines = {}
    for schedule in ("1f1b", "interleaved"):
        pipelines[schedule] = measure_pipeline(schedule)
        console.print(f"compiled: {schedule}")
    show(console, "175B parameters, 512 H200s, ZeRO 1", pipelines)
    found = measured | {"175B on 512": pipelines}
    console.print(f"written: {write_result('compiled_gpu', found).name}")


if __name__ == "__main__":
    main()
