"""Train a byte-level GPT on long text, attending to the blocks of a sparse pattern.

With no flags: 2,048 tokens at once on four CPU devices (data 2 x tensor 2). On GPUs:
--seq-len 32768 --block 128 --window 2048 --global-tokens 128 --precision bf16 --remat
full. The run is evaluated, saved, and reopened on one device; run it again to resume.
"""

import dataclasses
import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import jaxpar
from jaxpar import models
from jaxpar.config import preset
from jaxpar.data import DataConfig, Loader, batch_shapes, rows_of
from jaxpar.optim import CommunicationConfig
from jaxpar.show.rate_range import show_rate_range
from jaxpar.sparse_attention import SparsityPattern, causal_pattern
from jaxpar.training.left_out_config import LeftOutConfig

CPU_MESH = jaxpar.MeshShape(data=2, tensor=2)
OWN = ("seq_len", "remat", "attention")  # Flags of the recipe's own.


@dataclasses.dataclass(frozen=True)
class Config(jaxpar.StartOptions, DataConfig, CommunicationConfig, LeftOutConfig):
    """One run of the GPT on long text."""

    model: models.DecoderConfig = preset(models.PRESETS, "tiny", without=OWN)
    """The GPT's shape."""
    seq_len: int = 2048
    """Tokens that the model is trained on at once."""
    pattern: str = "longformer"
    """dense, fixed, variable, bigbird, longformer or sliding."""
    block: int = 64
    """Tokens along each side of a block of the pattern."""
    window: int = 256
    """Tokens before its own block that a token sees, or of a fixed window."""
    global_tokens: int = 64
    """First tokens that all see; of each window, for fixed."""
    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis; by default all accelerators on data, or data 2 x tensor 2."""
    precision: str = "fp32"
    """What the model computes in: fp32, bf16 or fp16. Masters are fp32."""
    batch_size: int = 4
    """Rows of the global batch."""
    steps: int = 100
    """Training steps; a run may go on with more."""
    learning_rate: float = 2e-3
    """Peak of the schedule; see --decay."""
    remat: str = "none"
    """Activation checkpointing of each block: none, full or dots."""
    eval_batches: int = 8
    """Held-out batches to evaluate on."""
    save_every: int = 50
    """Steps between checkpoints."""
    recovery: jaxpar.Recovery = dataclasses.field(default_factory=jaxpar.Recovery)
    """What is done about bad numbers, failed saves and corrupt replicas."""
    seed: int = 0
    """Of the parameters, of the data's order and of random blocks."""
    out: str = "runs/long_context"
    """The run's folder."""


def model_of(config: Config) -> tuple[models.DecoderConfig, SparsityPattern]:
    """The model, and the pattern that it has in place of dense attention."""
    own, length = config.model, config.seq_len
    model = dataclasses.replace(own, seq_len=length, remat=config.remat)
    pattern = causal_pattern(
        config.pattern,
        num_heads=model.num_heads,
        block=config.block,
        window=config.window,
        global_tokens=config.global_tokens,
        seed=config.seed,
    )
    return dataclasses.replace(model, attention=pattern), pattern


def build(config: Config, mesh: Mesh | None = None) -> jaxpar.Engine:
    """Make the engine of a config, on its own mesh or another."""
    model, _ = model_of(config)
    schedule = config.make_schedule(config.learning_rate, config.steps)
    return jaxpar.initialize(
        model=config.leaving_out(models.make_decoder(model), config.steps),
        loss_fn=models.decoder_loss,
        optimizer=config.joined(
            optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=0.1),
            config.mesh,
        ),
        sample_batch=batch_shapes(config.batch_size, config.seq_len),
        mesh=mesh or jaxpar.choose_mesh(config.mesh, on_cpu=CPU_MESH),
        zero=config.zero_stage(),
        precision=config.precision,
        accumulate=jaxpar.scaled_accumulation(1),
        clip_norm=1.0,
        seed=config.seed,
    )


def tokens_per_step(config: Config) -> int:
    """Tokens that a step predicts."""
    return config.batch_size * config.seq_len


def main(config: Config) -> None:
    """Train, evaluate, save, reopen on one device."""
    model, pattern = model_of(config)
    mesh = jaxpar.choose_mesh(config.mesh, on_cpu=CPU_MESH)
    opened = config.open_data(pack=False)
    run = jaxpar.open_run(config.out, config, {"corpus_sha256": opened.sha256})
    corpus, heldout, _ = opened.for_run(run.folder, model.vocab_size, byte_pairs=False)
    rows = functools.partial(rows_of, seq_len=config.seq_len)
    size: Any = {"batch_size": config.batch_size}
    loader = Loader(rows(corpus), seed=config.seed, **size)
    held = Loader(rows(heldout), repeat=False, num_batches=config.eval_batches, **size)
    engine = build(run.config, mesh)
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(f"mesh     {shape} on {mesh.devices.flat[0].device_kind} devices")
    work = models.tile_work_of(pattern, model.seq_len, model.num_heads)
    print(f"pattern  {config.pattern}: {work.active_tiles:.1%} of tiles active")
    loss = jaxpar.train(
        engine,
        loader,
        run,
        steps=config.steps,
        save_every=config.save_every,
        evaluate=lambda: jaxpar.mean_loss(engine, held),
        recovery=config.recovering(config.recovery),
        tokens_per_step=tokens_per_step(config),
    )
    assert loss is not None, "evaluated"
    if config.decay == "range" and jax.process_index() == 0:
        show_rate_range(run.folder)
    if jax.process_count() > 1:
        return  # One device is then another process's for all but one.
    reopened = build(
        run.config, jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1])
    )
    print(jaxpar.check_reopened(reopened, run, held, loss))


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
