"""One process of a run of several: trains on some meshes and writes down what it saw.

    python -m tests.multiprocess.worker SPEC OUT

SPEC is JSON: ``coordinator``, ``count``, ``index``, ``devices`` (of each process) and
``cases``, each the fields of a `Case`. OUT gets a list of what happened, as JSON.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpar
from jaxpar.checkpoint import DamagedError
from jaxpar.checkpoint.processes import on_all
from jaxpar.data import Loader, Tokens

BATCH, LENGTH, VOCAB, WIDTH, LAYERS = 16, 6, 40, 32, 2
START_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: its split, its steps, and the folders it restores from and saves to.

    And it evaluates batches of which two processes have so many rows. With a folder for
    its state on disk, parameters too, the engine is made twice, and the second one
    resumes.
    """

    data: int
    tensor: int
    zero: int
    accumulate: int = 1
    steps: int = 4
    restore: str | None = None
    save: str | None = None
    evaluated: tuple[tuple[int, int], ...] = ()
    disk: str | None = None


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        normal, named = nn.initializers.lecun_normal(), nn.with_logical_partitioning
        h = nn.Dense(2 * WIDTH, kernel_init=named(normal, ("embed", "mlp")))(x)
        h = nn.Dense(WIDTH, kernel_init=named(normal, ("mlp", "embed")))(nn.gelu(h))
        return x + h, None


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH)(tokens_BT)
        loop = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = loop()(x)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def loss_fn(model: Any, batch: dict) -> jaxpar.Weighted:
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weights = (tokens[:, 1:] % 5 > 0).astype(jnp.float32)
    return jaxpar.Weighted((losses * weights).sum(), weights.sum())


def make_loader() -> Loader:
    """A loader of this process's rows: JAX says which process it is."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 900, dtype=np.uint8)
    return Loader(
        Tokens((tokens,), files=("random",)), batch_size=BATCH, seq_len=LENGTH, seed=1
    )


def another_loss(model: Any, batch: dict) -> jaxpar.Weighted:
    """A loss that is not the same in each process."""
    loss = loss_fn(model, batch)
    return jaxpar.Weighted(loss.total * (1 + jax.process_index()), loss.weight)


def make_engine(case: Case, mesh: Mesh, loss_fn: Any = loss_fn) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=Net(),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2, eps=1e-6),
        sample_batch=make_loader().sample_batch,
        mesh=mesh,
        zero=case.zero,
        accumulate=case.accumulate,
        clip_norm=1.0,
        offload=case.disk and _on_disk(case.disk),
    )


def _on_disk(folder: str) -> jaxpar.Offload:
    given = {"optimizer": "disk", "params": "disk", "path": folder}
    return jaxpar.Offload(**given, piece_mb=0.001)


def run(case: Case, devices: list[Any]) -> dict[str, Any]:
    """Train on the devices; say which rows went in and what came out."""
    shape = jaxpar.MeshShape(data=case.data, tensor=case.tensor)
    mesh = jaxpar.make_mesh(shape, devices)
    engine, loader = make_engine(case, mesh), make_loader()
    if case.restore:
        engine.restore(case.restore, data=loader)
    rows, metrics = [], []
    for step in range(case.steps):
        if case.disk and step == case.steps // 2:
            del engine
            engine, loader = make_engine(case, mesh), make_loader()
            assert engine.resume(data=loader) == step
        batch = next(loader)
        rows.append(batch["tokens"].tolist())
        metrics.append(engine.step(batch))
    if case.save:
        engine.save(case.save, data=loader)
    held_out = engine.evaluate(next(loader))
    engine.wait()
    return {
        "rows": rows,
        "losses": [float(m["loss"]) for m in metrics],
        "norms": [float(m["grad_norm"]) for m in metrics],
        "held_out": float(held_out["loss"]),
        "own_shards": [
            len(leaf.addressable_shards) for leaf in jax.tree.leaves(engine.state)
        ],
        "refusal": _refusal(engine),
        "refused": _refused(engine),
        "programs": _refused_programs(case, mesh),
        "together": _failure_of_one(),
        "evaluated": [_evaluated(engine, counts) for counts in case.evaluated],
    }


def _evaluated(engine: jaxpar.Engine, counts: tuple[int, int]) -> list[float]:
    """Loss and weight of a batch, of which this process has its own rows."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, (sum(counts), LENGTH + 1))
    first, last = 0, sum(counts)
    if jax.process_count() > 1:
        first = sum(counts[: jax.process_index()])
        last = first + counts[jax.process_index()]
    found = engine.evaluate({"tokens": tokens[first:last].astype(np.int32)})
    return [float(found["loss"]), float(found["weight"])]


def _refused(engine: jaxpar.Engine) -> str:
    """What is said where the second process brings batches to evaluate that are wrong.

    The first one waited for it for ever.
    """
    if jax.process_count() == 1:
        return ""
    length = LENGTH + 1 - (jax.process_index() == 1)
    try:
        engine.evaluate({"tokens": np.zeros((4, length), np.int32)})
    except ValueError as error:
        return str(error)
    return "none"


def _refusal(engine: jaxpar.Engine) -> str:
    """What is said to a process that passes the rows of all."""
    if jax.process_count() == 1:
        return ""
    try:
        engine.step({"tokens": np.zeros((BATCH, LENGTH + 1), np.int32)})
    except ValueError as error:
        return str(error)
    return "none"


def _refused_programs(case: Case, mesh: Mesh) -> str:
    """What is said where each process traces another step."""
    if jax.process_count() == 1 or not case.save:
        return ""
    try:
        make_engine(case, mesh, another_loss).step(next(make_loader()))
    except ValueError as error:
        return str(error)
    return "none"


def _failure_of_one() -> str:
    """What each process is told of damage that only the second one has read."""
    try:
        return on_all(_read_on_the_first)
    except DamagedError as error:
        return str(error)


def _read_on_the_first() -> str:
    if jax.process_index() == 1:
        raise DamagedError("w[0:8] is not what the devices held")
    return "read"


def join(spec: dict[str, Any]) -> None:
    """Become one of the processes."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", spec["devices"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        spec["coordinator"],
        num_processes=spec["count"],
        process_id=spec["index"],
        initialization_timeout=START_SECONDS,
    )
    assert jax.process_count() == spec["count"]
    assert jax.local_device_count() == spec["devices"]


def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    join(spec)
    return [run(Case(**case), jax.devices()) for case in spec["cases"]]


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
