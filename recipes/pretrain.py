"""Train a GPT on the source of Python's standard library, sharded.

With no flags: ZeRO 3 on every accelerator, or on four CPU devices (data 2 x tensor 2,
the last quarter on data 4). Run it again to go on; `--out` names another run.
"""

import contextlib
import dataclasses
import functools
from typing import Any, cast

import jax

import jaxpar
from jaxpar import models
from jaxpar.config import preset
from jaxpar.data import GrowthConfig, Loader, rows_of
from jaxpar.launch import choose_meshes
from jaxpar.models import PRESETS, DecoderConfig
from jaxpar.optim import OPTIMIZERS, CommunicationConfig, OptimizerSettings
from jaxpar.show.loss import draw_loss
from jaxpar.show.rate_range import show_rate_range
from jaxpar.training.evaluations import mean_losses
from jaxpar.training.left_out_config import LeftOutConfig

CPU_MESH = jaxpar.MeshShape(data=2, tensor=2)
SET_HERE = "remat", "sequence_parallel"


@dataclasses.dataclass(frozen=True)
class Config(jaxpar.StartOptions, GrowthConfig, CommunicationConfig, LeftOutConfig):
    """One run of the GPT."""

    model: DecoderConfig = preset(PRESETS, "1m", without=("lora", *SET_HERE))
    """The GPT's shape."""
    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis; by default all accelerators on data, or data 2 x tensor 2."""
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
    clip_norm: float | None = 1.0
    """Largest global norm of the gradients."""
    offload: jaxpar.Offload = dataclasses.field(default_factory=jaxpar.Offload.nothing)
    """What is stored in the host's memory, not in the devices'."""
    remat: str = "none"
    """Activation checkpointing of each block: none, full, dots or save-names."""
    sequence_parallel: bool = False
    """Shard activations between blocks over tokens on the tensor axis."""
    pack: bool = False
    """Pack documents into rows, where none sees another; else windows of text."""
    eval_batches: int = 32
    """Held-out batches to evaluate on."""
    save_every: int = 120
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that stay, the newest."""
    recovery: jaxpar.Recovery = dataclasses.field(default_factory=jaxpar.Recovery)
    """What is done about bad numbers, failed saves and corrupt replicas."""
    seed: int = 0
    """Of the parameters and of the data's order."""
    out: str = "runs/pretrain"
    """The run's folder."""


def build(config: Config, mesh: jax.sharding.Mesh | None = None) -> jaxpar.Engine:
    """Make the engine of a config, on its own mesh or another."""
    how = {name: getattr(config, name) for name in SET_HERE}
    model = dataclasses.replace(config.model, **how)
    schedule = config.make_schedule(config.learning_rate, config.steps)
    return jaxpar.initialize(
        model=config.leaving_out(models.make_decoder(model), config.steps),
        loss_fn=models.decoder_loss,
        optimizer=config.joined(config.optimizer.make(schedule), config.mesh),
        **config.batch_arguments(config.batch_size, model.seq_len, pack=config.pack),
        mesh=mesh or jaxpar.choose_mesh(config.mesh, on_cpu=CPU_MESH),
        zero=config.zero_stage(),
        precision=config.precision,
        accumulate=jaxpar.scaled_accumulation(config.accumulate),
        schedule=config.schedule,
        clip_norm=config.clip_norm,
        offload=config.offload,
        seed=config.seed,
    )


def tokens_per_step(config: Config) -> int:
    """Tokens that a step predicts, with those that are padding or not learned."""
    return config.batch_size * config.model.seq_len


def main(config: Config) -> None:
    """Train, evaluate and save, on one mesh and then on another; sample."""
    meshes = choose_meshes(config.mesh, config.steps, on_cpu=CPU_MESH)
    seq_len, vocab = config.model.seq_len, config.model.vocab_size
    found = config.open_data(pack=config.pack)
    run = jaxpar.open_run(config.out, config, {"corpus_sha256": found.sha256})
    data, heldout, tokenizer = found.for_run(run.folder, vocab, cache=config.data_cache)
    rows = functools.partial(rows_of, seq_len=seq_len, pack=config.pack)
    size: Any = {"batch_size": config.batch_size}
    loader = config.open_loader(rows(data), config.batch_size, seq_len, config.seed)
    held = {
        name: Loader(rows(own), repeat=False, num_batches=config.eval_batches, **size)
        for name, own in config.open_suites(heldout, tokenizer, vocab).items()
    }
    print(f"corpus   {loader.source.description}")
    engine = loss = cast(Any, None)
    for mesh, steps in meshes:
        if steps < config.steps and steps <= (run.newest() or 0):
            continue
        engine = build(run.config, mesh)
        print(engine.explain().summary)
        loss = jaxpar.train(
            engine,
            loader,
            run,
            steps=steps,
            total_steps=config.steps,
            save_every=config.save_every,
            keep=config.keep,
            evaluate=mean_losses(engine, held),
            recovery=config.recovering(config.recovery),
            tokens_per_step=tokens_per_step(config),
        )
    if loss is not None and heldout.num_bytes and not config.pack:
        print(f"held-out {loss * len(heldout) / heldout.num_bytes:.3f} nats a byte")
    if config.decay == "range" and jax.process_index() == 0:
        show_rate_range(run.folder)
    if jax.process_count() > 1:
        return  # A sample needs the whole model in one process.
    given = engine.model(), heldout.read(at := len(heldout) // 2, at + 64), 400
    text = models.continue_text(*given, config=config.model, tokenizer=tokenizer)
    print(f"{' 400 tokens by the model ':─^80}\n{text}\n{'─' * 80}")
    (run.folder / "sample.txt").write_text(text, encoding="utf-8")
    with contextlib.suppress(ModuleNotFoundError):  # It needs matplotlib.
        print(f"picture  {draw_loss(run.folder).resolve()}")


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
