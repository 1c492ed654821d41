"""How does a run take its steps, some of which are replayed on shifted devices?"""

from collections.abc import Callable
from typing import Any

import jax

from jaxpar.engine.engine import Engine
from jaxpar.engine.replay import FACTOR, Replays
from jaxpar.engine.replicas import CorruptionError
from jaxpar.training.goodput import Clock
from jaxpar.types import Batch, Metrics


class Replaying:
    """Takes the steps of a run.

    Args:
      engine: of the run.
      every: steps between replays, as `Recovery.replay_every`.
      clock: accounts for the time of replays.
      report: writes an event, by its name, its step and fields.

    Raises:
      ValueError: if the engine's steps can't be replayed.
    """

    def __init__(
        self, engine: Engine, every: int, clock: Clock, report: Callable[..., None]
    ):
        self._engine, self._every = engine, every
        self._clock, self._report = clock, report
        self._replays = _replays(engine, every) if every else None
        self._agreed: int | None = None

    def step(self, step: int, batch: Batch) -> Metrics:
        """Take a step, and replay it if that is due.

        Args:
          step: its number.
          batch: as `Engine.step` takes it.

        Raises:
          CorruptionError: if the replay has another result.
        """
        is_first = self._agreed is None
        if self._replays is None or (step % self._every and not is_first):
            return self._engine.step(batch)
        with self._clock.during("replay"):
            self._replays.begin(batch)
        metrics = jax.block_until_ready(self._engine.step(batch))
        with self._clock.during("replay"):
            try:
                self._replays.check(metrics)
            except CorruptionError as error:
                raise CorruptionError(f"{error} {self._since()}") from error
        self._agreed = step
        if is_first:
            self._report("replays", step, every=self._every, **self._compared())
        return metrics

    def _since(self) -> str:
        if self._agreed is None:
            return "It is the first step that this start replayed."
        return f"The last step with equal results is {self._agreed}."

    def _compared(self) -> dict[str, Any]:
        assert self._replays is not None
        tolerance = self._replays.tolerance
        if not tolerance:
            return {"compared": "to the bit"}
        how = f"to {tolerance:.2g} of a shard's norm"
        own = f"{FACTOR:g} times what runs of this step differ by"
        return {"compared": f"{how}, {own}", "tolerance": tolerance}


def _replays(engine: Engine, every: int) -> Replays:
    try:
        return engine.replays()
    except ValueError as error:
        raise ValueError(f"recovery: replay_every={every}: {error}") from error
