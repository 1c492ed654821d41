"""Runs of a small model whose settings change between starts."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.config import preset
from jaxpar.data import Loader, Tokens
from jaxpar.optim import OPTIMIZERS, OptimizerSettings
from tests.runs import RULES

LENGTH, VOCAB = 4, 8


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 4, rngs=rngs)
        self.out = nnx.Linear(4, VOCAB, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return self.out(self.embed(tokens_BT))


def loss_fn(model: Net, batch: dict) -> jax.Array:
    tokens = batch["tokens"]
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def tokens(seed: int = 0, count: int = 1601) -> Tokens:
    ids = np.random.default_rng(seed).integers(0, VOCAB, count, dtype=np.uint8)
    return Tokens((ids,), files=("random",))


class Recorded(Loader):
    """A loader that keeps what it gave."""

    given: list[np.ndarray]

    def __next__(self) -> dict[str, Any]:
        batch = super().__next__()
        self.__dict__.setdefault("given", []).append(batch["tokens"])
        return batch


@dataclasses.dataclass(frozen=True)
class Config(jaxpar.StartOptions):
    steps: int = 3
    schedule_steps: int | None = None
    batch_size: int = 8
    rate: float = 0.1
    optimizer: OptimizerSettings = preset(OPTIMIZERS, "sgd")
    corpus: int = 0


def make_engine(config: Config, optimizer: Any = None, **options: Any) -> Any:
    shape = (config.batch_size, LENGTH + 1)
    return jaxpar.initialize(
        model=options.pop("model", lambda rngs: Net(rngs)),
        loss_fn=loss_fn,
        optimizer=optimizer or config.optimizer.make(config.rate),
        sample_batch={"tokens": jax.ShapeDtypeStruct(shape, np.int32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=2), jax.devices()[:2]),
        zero=1,
        **options,
    )


def go(
    folder: Path, config: Config, optimizer: Any = None, **options: Any
) -> tuple[Any, Recorded]:
    """Train to the config's last step; the engine and its loader."""
    data = Recorded(
        tokens(config.corpus), batch_size=config.batch_size, seq_len=LENGTH, seed=3
    )
    run = jaxpar.open_run(folder, config, {"corpus": config.corpus})
    engine = make_engine(run.config, optimizer, **options)
    jaxpar.train(engine, data, run, steps=config.steps, save_every=100, recovery=RULES)
    return engine, data


def stream(count: int, corpus: int = 0) -> np.ndarray:
    """The first rows of the stream, one by one."""
    rows = Loader(tokens(corpus), batch_size=1, seq_len=LENGTH, seed=3)
    return np.stack([next(rows)["tokens"][0] for _ in itertools.repeat(None, count)])
