"""Train a byte-level GPT on the source of Python's standard library, sharded.

With no flags: ZeRO 3 on every accelerator, or on four CPU devices (data 2 x tensor 2).
The run is evaluated on held-out files, saved, reopened on one device and sampled. Run
it again to resume; `--out` names another run.
"""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

import jaxpar
from jaxpar.config import parse
from jaxpar.data import Loader, Tokens, read_tokens, stdlib_source
from jaxpar.launch import choose_mesh
from jaxpar.metrics import MetricsLogger
from jaxpar.models import GPT, generate, gpt_config, gpt_loss
from jaxpar.run import open_run

CPU_MESH = jaxpar.MeshShape(data=2, tensor=2)


@dataclasses.dataclass(frozen=True)
class Config:
    """One run of the GPT."""

    model: str = "tiny"
    """A preset: tiny, 124m, 350m, 1.3b, 7b, or a row of Megatron's table."""
    mesh: jaxpar.MeshShape | None = None
    """Devices by axis; by default all accelerators on data, or data 2 x tensor 2."""
    zero: int = 3
    """ZeRO stage: 0, 1, 2 or 3."""
    precision: str = "fp32"
    """What the model computes in: fp32, bf16 or fp16. Masters are fp32."""
    batch_size: int = 16
    """Rows of the global batch."""
    accumulate: int = 1
    """Micro-batches a step."""
    steps: int = 600
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
    save_every: int = 200
    """Steps between checkpoints."""
    seed: int = 0
    """Of the parameters and of the data's order."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    out: str = "runs/gpt"
    """The run's folder."""


def build(config: Config, mesh: Mesh | None = None) -> jaxpar.Engine:
    """Make the engine of a config, on its own mesh or another."""
    model = gpt_config(
        config.model,
        remat=config.remat,
        sequence_parallel=config.sequence_parallel,
    )
    shape = (config.batch_size, model.seq_len + 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, math.ceil(config.steps / 10), config.steps
    )
    return jaxpar.initialize(
        model=lambda rngs: GPT(model, rngs=rngs),
        loss_fn=gpt_loss,
        optimizer=optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=0.1),
        sample_batch={"tokens": jax.ShapeDtypeStruct(shape, np.int32)},
        mesh=mesh or choose_mesh(config.mesh, on_cpu=CPU_MESH),
        zero=config.zero,
        precision=config.precision,
        accumulate=config.accumulate,
        clip_norm=config.clip_norm,
        seed=config.seed,
    )


def main(config: Config) -> None:
    """Train, evaluate, save, reopen on one device, sample."""
    console = Console(highlight=False, soft_wrap=True)
    mesh = choose_mesh(config.mesh, on_cpu=CPU_MESH)
    train, heldout = open_data(config)
    folder = open_run(config.out, config, {"corpus_sha256": train.sha256})
    seq_len = gpt_config(config.model).seq_len
    loader = Loader(
        train, batch_size=config.batch_size, seq_len=seq_len, seed=config.seed
    )
    engine = build(config, mesh)
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    console.print(f"corpus   {len(train):,} tokens, sha256 {train.sha256}")
    console.print(f"mesh     {shape} on {mesh.devices.flat[0].device_kind}")
    console.print(f"model    {config.model}, ZeRO {config.zero}, {config.precision}")
    checkpoints = folder / "checkpoints"
    start = engine.restore(checkpoints, data=loader) if checkpoints.exists() else 0
    console.print(f"held-out {evaluate(engine, heldout, config):.4f} at step {start}")
    with MetricsLogger(
        folder,
        total_steps=config.steps,
        tokens_per_step=config.batch_size * seq_len,
        tensorboard=config.tensorboard,
        append=True,
        resume_at=start,
    ) as logger:
        for step in range(start + 1, config.steps + 1):
            logger.log(step, engine.step(next(loader)))
            if step % config.save_every == 0 or step == config.steps:
                engine.save(checkpoints, data=loader)
    engine.wait()
    loss = evaluate(engine, heldout, config)
    console.print(f"held-out {loss:.6f} nats per token at step {config.steps}")
    reopened = reopen(config, checkpoints)
    again = evaluate(reopened, heldout, config)
    console.print(f"held-out {again:.6f} reopened on one device")
    check_same(loss, again, config.precision)
    console.rule("200 bytes by the model")
    console.print(sample(reopened, heldout, seq_len), markup=False)
    console.rule()
    console.print(f"files    {folder.resolve()}")


def open_data(config: Config) -> tuple[Tokens, Tokens]:
    """Open the training and the held-out tokens."""
    if bool(config.data) != bool(config.heldout):
        raise ValueError(
            f"data={config.data} and heldout={config.heldout}: give both, or neither "
            "for the standard library's source."
        )
    if not config.data:
        return stdlib_source()
    return read_tokens(*config.data), read_tokens(*config.heldout)


def evaluate(engine: jaxpar.Engine, heldout: Tokens, config: Config) -> float:
    """Mean loss over the first held-out batches, in nats per token."""
    batches = Loader(
        heldout,
        batch_size=config.batch_size,
        seq_len=gpt_config(config.model).seq_len,
        repeat=False,
        num_batches=config.eval_batches,
    )
    metrics = jax.device_get([engine.evaluate(batch) for batch in batches])
    weights = [float(m["weight"]) for m in metrics]
    return sum(
        float(m["loss"]) * w for m, w in zip(metrics, weights, strict=True)
    ) / sum(weights)


def reopen(config: Config, checkpoints: Path) -> jaxpar.Engine:
    """Restore the newest checkpoint on one device, whatever mesh it was saved on."""
    one = jaxpar.make_mesh(jaxpar.MeshShape(data=1), jax.devices()[:1])
    engine = build(dataclasses.replace(config, accumulate=1), one)
    engine.restore(checkpoints)
    return engine


def check_same(loss: float, again: float, precision: str) -> None:
    """Hold the reopened loss to the trained one."""
    # Half-precision activations round differently where the rows are split otherwise.
    tolerance = 1e-6 if precision == "fp32" else 5e-3
    if abs(again - loss) > tolerance * abs(loss):
        raise SystemExit(
            f"The reopened checkpoint's loss {again} differs from {loss} by more than "
            f"{tolerance} of it."
        )
    print(f"the two losses agree to {abs(again - loss) / abs(loss):.1e}")


def sample(engine: jaxpar.Engine, heldout: Tokens, seq_len: int) -> str:
    """Let the model write 200 tokens after the start of the held-out text."""
    prompt = heldout.read(0, seq_len // 4)[None].astype(np.int32)
    tokens = generate(engine.model(), prompt, 200, key=jax.random.key(0))
    return bytes(np.asarray(tokens[0, -200:]).astype(np.uint8)).decode(errors="replace")


if __name__ == "__main__":
    main(parse(Config, __doc__))
