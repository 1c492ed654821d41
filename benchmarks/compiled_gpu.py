"""What do programs compiled for H200s that are not here hold and move?

Beside tests/compiled, which hold the closed forms: the figures that settings and
docstrings are based on. Needs the compilers (`.ci/setup --compilers yes`); no GPU.

    python benchmarks/compiled_gpu.py
    python benchmarks/compiled_gpu.py --only bytes      # of GPT-2 124M and GPT-3 1.3B
    python benchmarks/compiled_gpu.py --only foreign    # of flax's layers, unscanned
    python benchmarks/compiled_gpu.py --only 8b         # does it fit one GPU?
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.contestants.jaxpar_gpt import make_engine
from benchmarks.contestants.protocol import SHAPES
from benchmarks.contestants.qwen3 import Qwen3, Qwen3Config
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.categories import moved_by_category, total
from jaxpar.compiled.hlo import parse as parse_program
from jaxpar.compiled.program import read_program
from jaxpar.losses import cross_entropy, next_token_loss
from jaxpar.losses.next_token import read_targets
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.remat import remat
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.models.attention_placeholder import attention_placeholder
from jaxpar.models.decoder.embed_head import Embed, Head
from jaxpar.models.decoder.model import Block
from jaxpar.models.decoder.presets import decoder_config
from jaxpar.optim import fused_adamw
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

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.embed, self.head = Embed(config, rngs=rngs), Head(config, rngs=rngs)
        self.head.logits = self.embed.embedding
        layers = range(config.num_layers)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in layers])

    def __call__(self, tokens_BT: jax.Array) -> Any:
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
    config = DecoderConfig(
        num_layers=12,
        num_heads=16,
        width=1024,
        seq_len=256,
        vocab_size=8192,
        remat="full",
    )
    mesh = make_mesh(MeshShape(), gpu_devices("h200", 8, 8))
    engine = jaxpar.initialize(
        model=make_decoder(config)
        if scan
        else lambda rngs: Unscanned(config, rngs=rngs),
        loss_fn=decoder_loss,
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
    config = DecoderConfig(
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
        model=make_decoder(config),
        loss_fn=decoder_loss,
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


def measure_bytes(part: str) -> dict[str, dict[str, float]]:
    """Compile a step for one H200, and sum its kernels by what they are for."""
    shape, mesh = SHAPES[part], make_mesh(MeshShape(), gpu_devices("h200", 1, 1))
    rows = jax.ShapeDtypeStruct((shape.batch, shape.length + 1), jnp.int32)
    engine = make_engine(shape, sample_batch={"tokens": rows}, mesh=mesh)
    return bytes_of(engine, shape.vocab)


def in_chunks(model: Qwen3, batch: dict[str, jax.Array]) -> jaxpar.Weighted:
    """The loss that owns the head, of a model that is not ours."""
    inputs_BT, targets_BT, weights_BT, _ = read_targets(batch)
    hidden_BTD = model.hidden(inputs_BT)
    kernel_DV = model.embed.embedding[...].T
    return cross_entropy(hidden_BTD, kernel_DV, targets_BT, weights_BT)


def bytes_on_h200(
    model: Any,
    loss: Callable[..., jaxpar.Weighted],
    optimizer: Any,
    *,
    rows: tuple[int, int],
    vocabulary: int,
) -> dict[str, dict[str, float]]:
    """Compile a model's step in bf16 for one H200, and sum as `bytes_of`."""
    engine = jaxpar.initialize(
        model=model,
        loss_fn=loss,
        optimizer=optimizer,
        sample_batch={"tokens": jax.ShapeDtypeStruct(rows, jnp.int32)},
        mesh=make_mesh(MeshShape(), gpu_devices("h200", 1, 1)),
        precision="bf16",
    )
    return bytes_of(engine, vocabulary)


def bytes_of_qwen3(
    config: Qwen3Config, loss: Callable[..., jaxpar.Weighted]
) -> dict[str, dict[str, float]]:
    """An unscanned model of flax's layers, on 8 rows of 2,048 tokens."""
    return bytes_on_h200(
        lambda rngs: Qwen3(config, rngs=rngs),
        loss,
        optax.adamw(1e-3),
        rows=(8, 2049),
        vocabulary=config.vocab_size,
    )


def bytes_of(engine: jaxpar.Engine, vocabulary: int) -> dict[str, dict[str, float]]:
    """Category -> launches and bytes of an engine's compiled step."""
    compiled = engine.lower().compile()
    moved = moved_by_category(parse_program(compiled.as_text() or ""), vocabulary)
    found = {
        name: {
            "launches": own.launches,
            "launches_in_loops": own.in_loops,
            "gb": own.bytes / 1e9,
        }
        for name, own in {**moved, "all": total(moved)}.items()
    }
    memory = read_program(compiled, engine.mesh).memory
    found["all"] |= {
        "state_and_batch_gb": memory.arguments / 1e9,
        "temporaries_gb": memory.temporaries / 1e9,
        "peak_gb": memory.peak / 1e9,
    }
    return found


def show(console: Console, title: str, measured: dict[str, dict[str, float]]) -> None:
    """Print a table."""
    columns = list(dict.fromkeys(name for row in measured.values() for name in row))
    table = Table(title, *columns)
    for name, row in measured.items():
        cells = (f"{row[each]:.2f}" if each in row else "" for each in columns)
        table.add_row(name, *cells)
    console.print(table)


def measure_stages(console: Console) -> dict[str, Any]:
    """ZeRO stages of scanned and unscanned layers."""
    measured = {}
    for name, case in CASES.items():
        measured[name] = measure(**case)
        console.print(f"compiled: {name}")
    show(console, "160M parameters, 64 H200s", measured)
    return measured


def measure_pipelines(console: Console) -> dict[str, Any]:
    """Schedules of a pipeline."""
    pipelines = {}
    for schedule in ("1f1b", "interleaved"):
        pipelines[schedule] = measure_pipeline(schedule)
        console.print(f"compiled: {schedule}")
    show(console, "175B parameters, 512 H200s, ZeRO 1", pipelines)
    return {"175B on 512": pipelines}


def measure_steps(console: Console) -> dict[str, Any]:
    """What one H200's step moves, by what its kernels are for."""
    found = {}
    for part in ("124m", "1.3b"):
        found[f"bytes of {part}"] = measure_bytes(part)
        show(console, f"{part} on one H200", found[f"bytes of {part}"])
    return found


def measure_8b(console: Console) -> dict[str, Any]:
    """Llama 3's 8B on a row of 8,192 tokens with full remat, by the optimizer."""
    config = decoder_config("8b", remat="full")
    optimizers = {
        "AdamW": optax.adamw(1e-4),
        "AdamW, moments in 8 bits": fused_adamw(1e-4, bits=8),
    }
    sizes: dict[str, Any] = {
        "rows": (1, config.seq_len + 1),
        "vocabulary": config.vocab_size,
    }
    found = {
        name: bytes_on_h200(make_decoder(config), decoder_loss, own, **sizes)["all"]
        for name, own in optimizers.items()
    }
    show(console, "8B, 8,192 tokens on one H200", found)
    return {"8B on one H200": found}


def measure_foreign_steps(console: Console) -> dict[str, Any]:
    """What an unscanned model of flax's layers pays: Qwen 3's shape, 8 x 2,048."""
    in_bf16 = Qwen3Config(dtype=jnp.bfloat16)
    # cuDNN's kernel can't be traced without a GPU.
    fused = dataclasses.replace(in_bf16, attend=attention_placeholder)
    cases = {
        "fp32 by its embedding": (Qwen3Config(), next_token_loss),
        "bf16": (in_bf16, next_token_loss),
        "bf16, fused attention": (fused, next_token_loss),
        "bf16, fused attention, loss in chunks": (fused, in_chunks),
    }
    found = {}
    for name, (config, loss) in cases.items():
        found[name] = bytes_of_qwen3(config, loss)
        show(console, f"Qwen 3, 0.6B, on one H200: {name}", found[name])
    return {f"bytes of Qwen 3, {name}": own for name, own in found.items()}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    only: Literal["stages", "pipelines", "bytes", "foreign", "8b"] | None = None
    """One of the five; by default all, and benchmarks/results/ is written."""


PARTS: dict[str, Callable[[Console], dict[str, Any]]] = {
    "stages": measure_stages,
    "pipelines": measure_pipelines,
    "bytes": measure_steps,
    "foreign": measure_foreign_steps,
    "8b": measure_8b,
}


def main(config: Config) -> None:
    """Compile, print and write."""
    prepare_process()
    console = Console()
    if config.only:
        PARTS[config.only](console)
        return
    found: dict[str, Any] = {}
    for part in PARTS.values():
        found |= part(console)
    console.print(f"written: {write_result('compiled_gpu', found).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
