"""Train a GPT on the source of Python's standard library, sharded.

With no flags: ZeRO 3 on every accelerator, or on four CPU devices (data 2 x tensor 2),
where the run is reopened for its last quarter on another mesh (data 4). It is evaluated
on held-out files, saved and sampled. Run it again to resume; `--out` names another run.
"""

import contextlib
import dataclasses
import itertools

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

import jaxpar
from jaxpar.data import Loader, encode, open_splits, open_tokenizer
from jaxpar.models import GPT, continue_text, gpt_config, gpt_loss

CPU_MESH = jaxpar.MeshShape(data=2, tensor=2)
SAMPLE = 400
"""Tokens that the trained model writes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One run of the GPT."""

    model: str = "1m"
    """A preset: tiny, 1m, 124m, 350m, 1.3b, 7b, or a row of Megatron's table."""
    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis; by default all accelerators on data, or data 2 x tensor 2."""
    last_mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis in the last quarter of the run, if it is to be another mesh."""
    zero: int = 3
    """ZeRO stage: 0, 1, 2 or 3."""
    precision: str = "fp32"
    """What the model computes in: fp32, bf16 or fp16. Masters are fp32."""
    batch_size: int = 8
    """Rows of the global batch."""
    accumulate: int = 1
    """Micro-batches a step."""
    steps: int = 640
    """Training steps."""
    learning_rate: float = 5e-3
    """Peak of the schedule: linear warm-up over a tenth of the run, then cosine."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients."""
    remat: str = "none"
    """Activation checkpointing of each block: none, full, dots or save-names."""
    sequence_parallel: bool = False
    """Shard activations between blocks over tokens on the tensor axis."""
    data: tuple[str, ...] = ()
    """Text files or folders, .bin or .npy tokens; by default the standard library.
    Text becomes byte pairs, as many as the model's vocabulary (bytes for tiny)."""
    heldout: tuple[str, ...] = ()
    """Held-out data in the same form; needed where `data` is given."""
    eval_batches: int = 32
    """Held-out batches to evaluate on."""
    save_every: int = 160
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
        optimizer=optax.inject_hyperparams(optax.adamw)(
            schedule, b2=0.95, weight_decay=0.1
        ),
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


def choose_meshes(config: Config) -> list[tuple[Mesh, int]]:
    """The meshes of the run, and the step that each trains to."""
    mesh = jaxpar.choose_mesh(config.mesh, on_cpu=CPU_MESH)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    moves = config.last_mesh != jaxpar.MeshShape()
    if moves or (on_cpu and config.mesh == jaxpar.MeshShape()):
        last = jaxpar.make_mesh(config.last_mesh)
        return [(mesh, config.steps * 3 // 4), (last, config.steps)]
    return [(mesh, config.steps)]


def train(
    config: Config,
    run: jaxpar.Run,
    data: tuple[Loader, list[dict[str, np.ndarray]]],
    mesh: Mesh,
    steps: int,
) -> tuple[jaxpar.Engine, float | None]:
    """Train to a step on a mesh; the engine, and the held-out loss."""
    engine, (loader, held) = build(config, mesh), data
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(f"mesh     {shape} on {mesh.devices.flat[0].device_kind} devices")
    print(engine.explain().summary)
    loss = jaxpar.train(
        engine,
        loader,
        run,
        steps=steps,
        total_steps=config.steps,
        save_every=config.save_every,
        keep=config.keep,
        evaluate=lambda: jaxpar.mean_loss(engine, held),
        recovery=config.recovery,
        tokens_per_step=tokens_per_step(config),
    )
    return engine, loss


def main(config: Config) -> None:
    """Train, evaluate and save, on one mesh and then on another; sample."""
    *first, (mesh, steps) = choose_meshes(config)
    corpus, heldout = open_splits(config.data, config.heldout)
    run = jaxpar.open_run(
        config.out,
        config,
        {"corpus_sha256": corpus.sha256},
        tensorboard=config.tensorboard,
    )
    print(f"corpus   {len(corpus):,} tokens, sha256 {corpus.sha256}")
    model = gpt_config(config.model)
    tokenizer, bytes_per_token = None, 1.0
    if corpus.vocab_size == 256 < model.vocab_size:
        path = run.folder / "tokenizer.json"
        tokenizer = open_tokenizer(path, corpus, model.vocab_size)
        num_bytes = len(heldout)
        corpus, heldout = encode(tokenizer, corpus), encode(tokenizer, heldout)
        bytes_per_token = num_bytes / len(heldout)
        print(f"tokens   {bytes_per_token:.2f} bytes long: {path.resolve()}")
    rows, length = config.batch_size, model.seq_len
    loader = Loader(corpus, batch_size=rows, seq_len=length, seed=config.seed)
    held = Loader(heldout, batch_size=rows, seq_len=length, repeat=False)
    data = loader, list(itertools.islice(held, config.eval_batches))

    for earlier, until in first:
        if (run.newest() or 0) < until:
            train(config, run, data, earlier, until)
    engine, loss = train(config, run, data, mesh, steps)
    assert loss is not None, "evaluated"
    print(f"held-out {loss / bytes_per_token:.3f} nats a byte")
    if jax.process_count() > 1:
        return  # A sample needs the whole model in one process.
    console = Console()
    console.rule(f"{SAMPLE} tokens by the model")
    print(
        continue_text(
            engine.model(),
            heldout.read(len(heldout) // 2, len(heldout) // 2 + 64),
            SAMPLE,
            tokenizer=tokenizer,
            temperature=0.5,
        )
    )
    console.rule()
    with contextlib.suppress(ModuleNotFoundError):  # It needs matplotlib.
        print(f"picture  {jaxpar.draw_loss(run.folder).resolve()}")
    print(f"files    {run.folder.resolve()}")


if __name__ == "__main__":
    main(jaxpar.parse(Config, __doc__))
