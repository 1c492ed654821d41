"""Train a mixture of experts on the source of Python's standard library, sharded.

With no flags: eight experts in the place of each MLP, of which a token goes to two;
ZeRO 3 on every accelerator, or on four CPU devices (data 2 x expert 2, the last quarter
on data 4). `--mesh.expert` splits the experts, `--model.experts.capacity-factor 1.25`
drops what exceeds it. Run it again to go on; `--out` names another run.
"""

import dataclasses
import functools
from typing import Any

import jax

import jaxpar
from jaxpar import models
from jaxpar.config import preset
from jaxpar.data import DataConfig, Loader, batch_shapes, rows_of
from jaxpar.launch import choose_meshes
from jaxpar.models import PRESETS, DecoderConfig
from jaxpar.optim import OPTIMIZERS, CommunicationConfig, OptimizerSettings
from jaxpar.show.rate_range import show_rate_range
from jaxpar.training.rate_config import RateConfig

CPU_MESH = jaxpar.MeshShape(data=2, expert=2)
ROUTERS = "largest_expert_load", "dropped_tokens"


@dataclasses.dataclass(frozen=True)
class Config(jaxpar.StartOptions, DataConfig, CommunicationConfig, RateConfig):
    """One run of the mixture."""

    model: DecoderConfig = preset(PRESETS, "1m-moe", without=("remat", "lora"))
    """The decoder's shape, with that of its experts."""
    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis; by default all accelerators on data, or data 2 x expert 2."""
    precision: str = "fp32"
    """What the model computes in: fp32, bf16 or fp16. Masters are fp32."""
    batch_size: int = 8
    """Rows of the global batch."""
    accumulate: int = 1
    """Micro-batches a step; a pipeline keeps its stages busy with many."""
    schedule: str = "1f1b"
    """1f1b, gpipe, zero_bubble, interleaved, interleaved:4, pipedream_2bw, pipemare."""
    steps: int = 480
    """Training steps; a run may go on with more."""
    optimizer: OptimizerSettings = preset(OPTIMIZERS, "adamw")
    """The optimizer, but for its learning rate."""
    learning_rate: float = 5e-3
    """Peak of the schedule; see --decay."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients."""
    remat: str = "none"
    """Activation checkpointing of each block: none, full, dots or save-names."""
    pack: bool = False
    """Pack documents into rows, where none sees another; else windows of text."""
    eval_batches: int = 32
    """Held-out batches to evaluate on."""
    save_every: int = 120
    """Steps between checkpoints."""
    seed: int = 0
    """Of the parameters and of the data's order."""
    out: str = "runs/moe"
    """The run's folder."""


def build(config: Config, mesh: jax.sharding.Mesh | None = None) -> jaxpar.Engine:
    """Make the engine of a config, on its own mesh or another."""
    model = dataclasses.replace(config.model, remat=config.remat)
    schedule = config.make_schedule(config.learning_rate, config.steps)
    return jaxpar.initialize(
        model=models.make_decoder(model),
        loss_fn=models.decoder_loss,
        optimizer=config.joined(config.optimizer.make(schedule), config.mesh),
        sample_batch=batch_shapes(config.batch_size, model.seq_len, pack=config.pack),
        mesh=mesh or choose_meshes(config.mesh, 1, on_cpu=CPU_MESH)[0][0],
        zero=config.zero_stage(),
        precision=config.precision,
        accumulate=jaxpar.scaled_accumulation(config.accumulate),
        schedule=config.schedule,
        clip_norm=config.clip_norm,
        seed=config.seed,
    )


def routing_of(engine: jaxpar.Engine, held: Loader) -> str:
    """How held-out tokens go to the experts."""
    found = jax.device_get([engine.evaluate(batch) for batch in held])
    load, dropped = (sum(float(x[k]) for x in found) / len(found) for k in ROUTERS)
    return f"the busiest expert has {load:.2f} x the mean, {dropped:.1%} are dropped"


def main(config: Config) -> None:
    """Train, evaluate and save, on one mesh and then on another."""
    if not config.model.experts.num:
        raise ValueError(
            "--model.experts.num 0: the model has no experts; give a number of them, "
            "or use recipes/pretrain.py."
        )
    meshes = choose_meshes(config.mesh, config.steps, on_cpu=CPU_MESH)
    model, opened = config.model, config.open_data(pack=config.pack)
    run = jaxpar.open_run(config.out, config, {"corpus_sha256": opened.sha256})
    corpus, heldout, _ = opened.for_run(
        run.folder, model.vocab_size, cache=config.data_cache
    )
    rows = functools.partial(rows_of, seq_len=model.seq_len, pack=config.pack)
    size: Any = {"batch_size": config.batch_size}
    loader = Loader(rows(corpus), seed=config.seed, **size)
    held = Loader(rows(heldout), repeat=False, num_batches=config.eval_batches, **size)
    print(f"corpus   {loader.source.description}")
    engine: Any = None
    for mesh, steps in meshes:
        if steps < config.steps and steps <= (run.newest() or 0):
            continue
        engine = build(run.config, mesh)
        print(engine.explain().summary)
        jaxpar.train(
            engine,
            loader,
            run,
            steps=steps,
            total_steps=config.steps,
            save_every=config.save_every,
            evaluate=functools.partial(jaxpar.mean_loss, engine, held),
            recovery=config.recovering(jaxpar.Recovery()),
            tokens_per_step=config.batch_size * model.seq_len,
        )
        print(f"routing  {routing_of(engine, held)}")
    if config.decay == "range" and jax.process_index() == 0:
        show_rate_range(run.folder)


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
