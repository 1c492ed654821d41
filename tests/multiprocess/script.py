"""A small run for the launchers: what a user's script is, with faults to plant.

jaxpar launch local --processes 2 --out RUN tests/multiprocess/script.py -- --steps 9
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from jaxpar.cli.recipe_flags import parse
from jaxpar.data import Loader, Tokens
from jaxpar.launch import choose_mesh, scaled_accumulation
from jaxpar.launch.worker_environment import current
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.training.loop import train
from jaxpar.training.opening import open_run
from jaxpar.training.recovery import Recovery

ROWS, LENGTH = 16, 16
MODEL = DecoderConfig(
    vocab_size=64, seq_len=LENGTH, num_layers=2, num_heads=4, width=32, dropout=0.1
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A run of a tiny GPT."""

    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis; by default data 2."""
    zero: int = 2
    """ZeRO stage."""
    dropout: float = 0.1
    """0 where runs of other meshes are compared."""
    accumulate: int = 2
    """Micro-batches a step."""
    steps: int = 12
    """Training steps."""
    save_every: int = 4
    """Steps between checkpoints."""
    corpus: int = 0
    """Which random tokens."""
    pause: float = 0.0
    """Seconds that every batch takes, in every process."""
    recovery: Recovery = dataclasses.field(default_factory=lambda: Recovery(window=12))
    """What is done about trouble."""
    out: str = "runs/script"
    """The run's folder."""


class Slowly:
    """Batches that take a while."""

    def __init__(self, loader: Loader, pause: float):
        self._loader, self._pause = loader, pause

    def __next__(self) -> Any:
        time.sleep(self._pause)
        return next(self._loader)

    def get_state(self) -> Any:
        return self._loader.get_state()

    def set_state(self, state: Any) -> None:
        self._loader.set_state(state)


def main(config: Config, pauses: dict[int, float] | None = None) -> None:
    """Train; `pauses` are of single workers, and no part of the config."""
    mesh = choose_mesh(config.mesh, on_cpu=jaxpar.MeshShape(data=2))
    rng = np.random.default_rng(config.corpus)
    tokens = Tokens((rng.integers(0, 64, 4000, dtype=np.uint8),), files=("random",))
    run = open_run(config.out, config, {"corpus_sha256": tokens.sha256})
    loader = Loader(tokens, batch_size=ROWS, seq_len=LENGTH, seed=3)
    model = dataclasses.replace(MODEL, dropout=config.dropout)
    engine = jaxpar.initialize(
        model=make_decoder(model),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(3e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), np.int32)},
        mesh=mesh,
        zero=config.zero,
        accumulate=scaled_accumulation(config.accumulate),
        clip_norm=1.0,
    )
    worker = current()
    own = (pauses or {}).get(worker.index if worker else 0, 0.0)
    train(
        engine,
        Slowly(loader, config.pause + own),
        run,
        steps=config.steps,
        save_every=config.save_every,
        recovery=config.recovery,
    )


if __name__ == "__main__":
    main(parse(Config, __doc__))
