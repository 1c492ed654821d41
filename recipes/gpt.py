"""Train a byte-level GPT on the source of Python's standard library, sharded.

With no flags: ZeRO 3 on every accelerator, or on four CPU devices (data 2 x tensor 2).
The run is evaluated on held-out files, saved, reopened on one device and sampled. Run
it again to resume; `--out` names another run.
"""

import dataclasses
import itertools

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

import jaxpar
from jaxpar.data import Loader, open_splits
from jaxpar.models import GPT, continue_text, gpt_config, gpt_loss

CPU_MESH = jaxpar.MeshShape(data=2, tensor=2)


@dataclasses.dataclass(frozen=True)
class Config:
    """One run of the GPT."""

    model: str = "tiny"
    """A preset: tiny, 124m, 350m, 1.3b, 7b, or a row of Megatron's table."""
    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis; by default all accelerators on data, or data 2 x tensor 2."""
    zero: int = 3
    """ZeRO stage: 0, 1, 2 or 3."""
    precision: str = "fp32"
    """What the model computes in: fp32, bf16 or fp16. Masters are fp32."""
    batch_size: int = 16
    """Rows of the global batch."""
    accumulate: int = 1
    """Micro-batches a step."""
    steps: int = 160
    """Training steps."""
    learning_rate: float = 2e-3
    """Peak of the schedule: linear warm-up over a tenth of the run, then cosine."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients."""
    remat: str = "none"
    """Activation checkpointing of each block: none, full, dots or save-names."""
    sequence_parallel: bool = False
    """Shard activations between blocks over tokens on the tensor axis."""
    data: tuple[str, ...] = ()
    """Text files or folders, .bin or .npy tokens; by default the standard library."""
    heldout: tuple[str, ...] = ()
    """Held-out data in the same form; needed where `data` is given."""
    eval_batches: int = 16
    """Held-out batches to evaluate on."""
    save_every: int = 80
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that stay, the newest."""
    recovery: jaxpar.Recovery = dataclasses.field(default_factory=jaxpar.Recovery)
    """What is done about bad numbers, failed saves and corrupt replicas."""
    seed: int = 0
    """Of the parameters and of the data's order."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    out: str = "runs/gpt"
    """The run's folder."""


def build(config: Config, mesh: Mesh | None = None) -> jaxpar.Engine:
    """Make the engine of a config, on its own mesh or another."""
    model = gpt_config(
        config.model, remat=config.remat, sequence_parallel=config.sequence_parallel
    )
    shape = (config.batch_size, model.seq_len + 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.steps // 10, config.steps
    )
    return jaxpar.initialize(
        model=lambda rngs: GPT(model, rngs=rngs),
        loss_fn=gpt_loss,
        optimizer=optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=0.1),
        sample_batch={"tokens": jax.ShapeDtypeStruct(shape, np.int32)},
        mesh=mesh or jaxpar.choose_mesh(config.mesh, on_cpu=CPU_MESH),
        zero=config.zero,
        precision=config.precision,
        accumulate=jaxpar.scaled_accumulation(config.accumulate),
        clip_norm=config.clip_norm,
        seed=config.seed,
    )


def tokens_per_step(config: Config) -> int:
    """Tokens that a step learns to predict."""
    return config.batch_size * gpt_config(config.model).seq_len


def main(config: Config) -> None:
    """Train, evaluate, save, reopen on one device, sample."""
    console = Console(highlight=False, soft_wrap=True)
    mesh = jaxpar.choose_mesh(config.mesh, on_cpu=CPU_MESH)
    corpus, heldout = open_splits(config.data, config.heldout)
    run = jaxpar.open_run(config.out, config, {"corpus_sha256": corpus.sha256})
    seq_len = gpt_config(config.model).seq_len
    rows = config.batch_size
    loader = Loader(corpus, batch_size=rows, seq_len=seq_len, seed=config.seed)
    held = Loader(heldout, batch_size=rows, seq_len=seq_len, repeat=False)
    held_batches = list(itertools.islice(held, config.eval_batches))
    engine = build(config, mesh)
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    console.print(f"corpus   {len(corpus):,} tokens, sha256 {corpus.sha256}")
    console.print(f"mesh     {shape} on {mesh.devices.flat[0].device_kind} devices")
    loss = jaxpar.train(
        engine,
        loader,
        run,
        steps=config.steps,
        save_every=config.save_every,
        keep=config.keep,
        evaluate=lambda: jaxpar.mean_loss(engine, held_batches),
        recovery=config.recovery,
        tokens_per_step=tokens_per_step(config),
        tensorboard=config.tensorboard,
    )
    assert loss is not None, "evaluated"
    if jax.process_count() > 1:
        return  # One device is then another process's for all but one.
    one = jaxpar.make_mesh(jaxpar.MeshShape(data=1), jax.devices()[:1])
    reopened = build(dataclasses.replace(config, accumulate=1), one)
    console.print(jaxpar.check_reopened(reopened, run, held_batches, loss))
    console.rule("200 bytes by the model")
    text = continue_text(reopened.model(), heldout.read(0, 64), 200)
    console.print(text, markup=False)
    console.rule()
    console.print(f"files    {run.folder.resolve()}")


if __name__ == "__main__":
    main(jaxpar.parse(Config, __doc__))
