"""A small run with dropout, shuffled data and batches that can be planted."""

import dataclasses
import functools
import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.data import Loader, Tokens
from jaxpar.engine.run_ahead import RunAhead
from jaxpar.training.loop import train
from jaxpar.training.metrics import read_metrics
from jaxpar.training.opening import open_run
from jaxpar.training.recovery import Recovery
from jaxpar.training.run import Run
from jaxpar.tree import named_leaves

ROWS, LENGTH, VOCAB, WIDTH = 16, 8, 40, 16
STEPS, SAVE_EVERY = 40, 6
RULES = Recovery(window=12, probe_every=0)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.out(self.drop(self.embed(tokens_BT)))


def loss_fn(model: Net, batch: dict) -> jax.Array:
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return (losses.mean(axis=1) * batch["boost"]).mean()


def nan_in_one_row() -> np.ndarray:
    boost = np.ones(ROWS, np.float32)
    boost[3] = np.nan
    return boost


class Data:
    """Shuffled tokens; planted batches have other boosts, and some call a function."""

    def __init__(self, boosts: Mapping[int, Any] | None = None, calls: Any = None):
        tokens = np.random.default_rng(0).integers(0, 9, 4000, dtype=np.uint8)
        self._loader = Loader(
            Tokens((tokens,), files=("random",)),
            batch_size=ROWS,
            seq_len=LENGTH,
            seed=3,
        )
        self._boosts, self._calls = boosts or {}, calls or {}

    def __next__(self) -> dict[str, np.ndarray]:
        ordinal = self._loader.rows // ROWS
        self._calls.pop(ordinal, lambda: None)()
        batch = next(self._loader)
        boost = np.full(ROWS, 1.0, np.float32)
        boost[:] = self._boosts.get(ordinal, boost)
        rows = len(batch["tokens"])
        first = rows * jax.process_index()
        return {**batch, "boost": boost[first : first + rows]}

    def get_state(self) -> dict[str, Any]:
        return self._loader.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._loader.set_state(state)


def make_engine(
    precision: str = "fp32",
    accumulate: int = 2,
    mesh: jax.sharding.Mesh | None = None,
    zero: int = 2,
) -> jaxpar.Engine:
    sample = {
        "tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), np.int32),
        "boost": jax.ShapeDtypeStruct((ROWS,), np.float32),
    }
    return jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=optax.adamw(3e-3),
        sample_batch=sample,
        mesh=mesh or jaxpar.make_mesh(jaxpar.MeshShape(data=4, tensor=2)),
        zero=zero,
        precision=precision,
        accumulate=accumulate,
    )


@functools.cache
def shared(precision: str = "fp32") -> tuple[jaxpar.Engine, jaxpar.TrainState]:
    """An engine, and the state it began with."""
    engine = make_engine(precision)
    return engine, jax.tree.map(jnp.copy, engine.state)


def fresh(precision: str = "fp32") -> jaxpar.Engine:
    """The shared engine, as it was when it was made."""
    engine, state = shared(precision)
    engine._leaves = jax.tree.leaves(jax.tree.map(jnp.copy, state))
    engine._checkpoints.clear()
    engine._ahead = RunAhead()
    return engine


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = "a"


def run_in(folder: Path) -> Run:
    return open_run(folder, Config(), {})


def go(engine: jaxpar.Engine, data: Data, folder: Path, **options: Any) -> None:
    given = {"steps": STEPS, "save_every": SAVE_EVERY, "recovery": RULES} | options
    train(engine, data, run_in(folder), **given)


def bits(engine: jaxpar.Engine) -> list[bytes]:
    state = dataclasses.replace(engine.state, key=jax.random.key_data(engine.state.key))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def losses(folder: Path) -> dict[int, float]:
    found = read_metrics(folder / "metrics.jsonl")
    assert len({record["step"] for record in found}) == len(found)
    return {
        record["step"]: record["train/loss"]
        for record in found
        if "train/loss" in record
    }


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] in kinds]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def flip_in_one_replica(engine: jaxpar.Engine, rng: random.Random) -> tuple[str, int]:
    """Flip one bit of one device's copy of a leaf; the leaf's name and the device."""
    named = named_leaves(engine.state)
    held = [
        (i, name)
        for i, (name, leaf) in enumerate(named.items())
        if leaf.size
        and leaf.sharding.shard_shape(leaf.shape) == leaf.shape
        and leaf.dtype in (jnp.float32, jnp.int32)
    ]
    position, name = rng.choice(held)
    leaf = engine._leaves[position]
    shards = [np.array(s.data, copy=True) for s in leaf.addressable_shards]
    devices = [s.device for s in leaf.addressable_shards]
    which = rng.randrange(len(shards))
    flat = shards[which].reshape(-1).view(np.uint32)
    flat[rng.randrange(flat.size)] ^= np.uint32(1) << np.uint32(rng.randrange(32))
    placed = [jax.device_put(s, d) for s, d in zip(shards, devices, strict=True)]
    engine._leaves[position] = jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, placed
    )
    return name, devices[which].id
