"""What does a pipeline cost: each schedule's step beside one stage, and beside GPipe.

On eight CPU devices: a GPT of 8 layers, 32 micro-batches; every schedule on data 2 x
pipe 4, the same batch on data 8 without a pipeline, and GPipe as it is had by
differentiating a scan of forwards, written here. They take turns in one process. Then
the memory with 4, 8 and 16 layers; and, from the tables alone, what schedules cost
models of 70 and 175 billion parameters.

    python benchmarks/pipeline.py
"""

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.program import read_program
from jaxpar.mesh import DATA, PIPE
from jaxpar.model.proxies import Call, ModelProxy, inputs_of
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import cost, kept

ZERO_STAGES, WAYS = 4, 2
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
LARGE = {"70B": (80, 8192, 4096), "175B": (96, 12_288, 2048)}
"""Layers, width and tokens a micro-batch: Llama 2's and GPT-3's."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    microbatches: int = 32
    """Of two rows each, one a data shard."""
    layers: int = 8
    """Of the GPT."""
    width: int = 128
    """Likewise."""
    length: int = 256
    """Tokens a row."""
    rounds: int = 6
    """Turns; medians count."""
    write: bool = True
    """Write benchmarks/results/pipeline.json."""


def make_model(config: Config, remat: str = "full") -> jaxpar.PipelineModel:
    """The GPT."""
    shape = DecoderConfig(
        num_layers=config.layers,
        num_heads=4,
        width=config.width,
        seq_len=config.length,
        remat=remat,
        # Keeps its arguments alone, as attention on GPUs does.
        attention="xla",
    )
    return make_decoder(shape)


def make_batch(config: Config) -> dict[str, np.ndarray]:
    """Random tokens."""
    shape = (WAYS * config.microbatches, config.length + 1)
    return {"tokens": np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)}


def engine_step(
    config: Config, mesh: jaxpar.MeshShape, schedule: str, accumulate: int, remat: str
) -> tuple[Callable[[], float], float]:
    """An engine's step, and its temporary megabytes."""
    batch = make_batch(config)
    engine = jaxpar.initialize(
        model=make_model(config, remat),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch=batch,
        mesh=mesh,
        zero=0,
        accumulate=accumulate,
        schedule=schedule,
    )
    program = read_program(engine.lower().compile(), engine.mesh)
    return lambda: float(engine.step(batch)["loss"]), program.memory.temporaries / 1e6


def autodiff_loss(config: Config, network: Any, key: jax.Array) -> Callable:
    """``(params, stage's number, tokens) -> loss`` of GPipe, for shard_map."""
    M, last = config.microbatches, ZERO_STAGES - 1

    def stage(blocks: Any, hidden: jax.Array) -> jax.Array:
        def layer(hidden: jax.Array, block: Any) -> tuple[jax.Array, None]:
            own = (hidden, jnp.int32(0), Call((), {}), key)
            run = functools.partial(network.run_block, training=True, policy="none")
            return run(network.sections[0], (block, {}), *own)[0], None

        return jax.lax.scan(layer, hidden, blocks)[0]

    def loss(params: Any, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        def answer(call: Call) -> Any:
            given = (params["head"], {}), network.tied(params["embed"]), hidden, call
            return network.run_head(*given, key, training=True)[0]

        out = decoder_loss(ModelProxy(answer, training=True), {"tokens": tokens})
        return out.total / out.weight

    def forwards(params: Any, numbers: jax.Array, tokens: jax.Array) -> jax.Array:
        by_microbatch = tokens.reshape(-1, M, tokens.shape[-1]).swapaxes(0, 1)

        def tick(arrived: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            own = {"tokens": by_microbatch[jnp.clip(t, 0, M - 1)]}
            call = inputs_of(decoder_loss, own, training=True)
            own = params["embed"], {}
            entered, _ = network.run_embed(own, call, key, training=True)
            hidden = jnp.where(numbers[0] == 0, entered, arrived)
            out = jax.checkpoint(stage)(params["blocks"], hidden)
            pairs = [(here, here + 1) for here in range(last)]
            return jax.lax.ppermute(out, PIPE, pairs), out

        empty = jnp.zeros((tokens.shape[0] // M, config.length, config.width))
        _, outs = jax.lax.scan(tick, empty, jnp.arange(M + last))
        one = jax.checkpoint(functools.partial(loss, params))
        losses = jax.lax.map(lambda pair: one(*pair), (outs[last:], by_microbatch))
        own = jnp.where(numbers[0] == last, losses.mean(), 0.0)
        return jax.lax.pmean(jax.lax.psum(own, PIPE), DATA)

    return forwards


def autodiff_step(config: Config) -> tuple[Callable[[], float], float]:
    """GPipe by differentiating a scan of forwards, each stage under jax.checkpoint."""
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=WAYS, pipe=ZERO_STAGES))
    rows = {"tokens": jax.ShapeDtypeStruct((1, config.length + 1), jnp.int32)}
    network = make_model(config).make_network(decoder_loss, rows)
    optimizer, key = optax.adamw(1e-3), jax.random.key(0)
    params, _ = network.init(key)
    specs = {
        name: jax.tree.map(lambda _, n=name: P(PIPE) if n == "blocks" else P(), part)
        for name, part in params.items()
    }
    mapped = jax.shard_map(
        autodiff_loss(config, network, key),
        mesh=mesh,
        in_specs=(specs, P(PIPE), P(DATA)),
        out_specs=P(),
        axis_names={DATA, PIPE},
        check_vma=False,
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple:
        numbers = jnp.arange(ZERO_STAGES)
        loss, grads = jax.value_and_grad(mapped)(params, numbers, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.device_put(params, places)
    held = [params, jax.jit(optimizer.init)(params)]
    sharding = NamedSharding(mesh, P(DATA))
    tokens = jax.device_put(make_batch(config)["tokens"], sharding)
    compiled = step.lower(*held, tokens).compile()
    program = read_program(compiled, mesh)

    def take() -> float:
        held[0], held[1], loss = compiled(*held, tokens)
        return float(loss)

    return take, program.memory.temporaries / 1e6


def measure(config: Config, console: Console) -> dict[str, dict[str, float]]:
    """Time everything in turns."""
    pipes, M = jaxpar.MeshShape(data=WAYS, pipe=ZERO_STAGES), config.microbatches
    steps: dict[str, tuple[Callable[[], float], float]] = {}
    steps["GPipe by autodiff"] = autodiff_step(config)
    rows = WAYS * M // 8
    whole = jaxpar.MeshShape(data=8)
    steps["data 8, no pipeline"] = engine_step(config, whole, "1f1b", rows, "none")
    for schedule in SCHEDULES:
        steps[schedule] = engine_step(config, pipes, schedule, M, "full")
        console.print(f"compiled: {schedule}")
    steps["1f1b, residuals kept"] = engine_step(config, pipes, "1f1b", M, "none")
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for number in range(config.rounds + 1):
        for name, (take, _) in steps.items():
            began = time.perf_counter()
            loss = take()
            losses.setdefault(name, loss)
            if number:
                times[name].append(time.perf_counter() - began)
    return {
        name: {
            "seconds": statistics.median(times[name]),
            "temporaries_mb": steps[name][1],
            "first_loss": losses[name],
        }
        for name in steps
    }


def temporaries(config: Config) -> dict[str, dict[str, float]]:
    """Temporary megabytes by the blocks a stage has: these grow, rings do not."""
    found = {}
    for blocks in (1, 2, 4):
        own = dataclasses.replace(config, layers=ZERO_STAGES * blocks)
        pipes = jaxpar.MeshShape(data=WAYS, pipe=ZERO_STAGES)
        _, ours = engine_step(own, pipes, "1f1b", own.microbatches, "full")
        _, theirs = autodiff_step(own)
        row = {"1f1b_mb": ours, "GPipe_by_autodiff_mb": theirs, "ratio": ours / theirs}
        found[f"{blocks} blocks a stage"] = row
    return found


def on_paper(stages: int = 8, microbatches: int = 32) -> dict[str, Any]:
    """Bubble, live inputs and traffic of each schedule, for large models."""
    found: dict[str, Any] = {}
    for name in ("1f1b", "gpipe", "interleaved:2", "interleaved:4", "zero_bubble"):
        schedule = make_schedule(name, stages, microbatches)
        split = {"backward": 1.0, "weight": 1.0} if schedule.splits_backward else {}
        live = int(kept(schedule).inputs.max())
        row: dict[str, Any] = {"bubble": cost(schedule, **split).bubble, "live": live}
        repeats = schedule.num_chunks
        row["maxtext_circular_bubble"] = (stages - 1) / (
            repeats * microbatches + stages - 1
        )
        for model, (_, width, tokens) in LARGE.items():
            activation = 2 * width * tokens
            row[f"{model}_live_gb"] = live * activation / 1e9
            sent = 2 * microbatches * (stages * repeats - 1) / stages
            ends = 4 * microbatches
            row[f"{model}_sent_gb_a_stage"] = sent * activation / 1e9
            row[f"{model}_ends_gb"] = ends * activation / 1e9
        found[name] = row
    return found


def show(console: Console, title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print a table."""
    table = Table(title, *next(iter(rows.values())))
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    console.print(table)


def main(config: Config) -> None:
    """Measure, print and write."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    console = Console(width=150)
    measured = measure(config, console)
    show(console, f"{config.microbatches} micro-batches", measured)
    ours, theirs = measured["1f1b"], measured["GPipe by autodiff"]
    ratio = ours["seconds"] / theirs["seconds"]
    console.print(f"1f1b / GPipe by autodiff, seconds: {ratio:.2f} (mark 1.05)")
    memory = temporaries(config)
    show(console, "temporaries (mark 0.5)", memory)
    paper = on_paper()
    show(console, "8 stages, 32 micro-batches", paper)
    if config.write:
        path = write_result(
            "pipeline", {"cpu": measured, "memory": memory, "on_paper": paper}
        )
        console.print(f"written: {path.name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
