"""Pipelines without a bubble: what a step leaves unfinished, the next ones finish.

Batches follow each other as the micro-batches of one batch do in 1F1B, and every stage
has a forward and a backward in every tick. A batch begins D steps before the one that
takes its update, D = ceil(2 (P - 1) / M), so that its gradient is of older parameters.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021), for
PipeDream-2BW; Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training"
(2021). Differs: all stages update at the end of a step, because the norm that clips,
and optimizers such as LAMB, need the gradients of all. A backward is 2 (P - 1 - s)
ticks after its forward, as in this project's 1F1B.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from jaxpar.pipeline.schedules.table import Schedule, empty


@runtime_checkable
class Asynchronous(Protocol):
    """An asynchronous schedule.

    Attributes:
      name: for people.
      synchronous_steps: steps at the beginning that end before the next one begins.
    """

    name: str
    synchronous_steps: int

    def table(self, num_stages: int, num_microbatches: int) -> Schedule:
        """A step in the steady state.

        Args:
          num_stages: P, at least 2.
          num_microbatches: M, at least 1.

        Raises:
          ValueError: if it does not support these numbers.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PipeDream2BW(Asynchronous):
    """Every batch uses one version of the parameters, forwards and backwards.

    Its gradient is applied one update late: ``w(t + 1) = w(t) - lr grad f(w(t - 1))``.
    The step keeps two versions, so batches have at least 2 (P - 1) micro-batches.

    Attributes:
      synchronous_steps: steps at the beginning without delay.
    """

    synchronous_steps: int = 0
    name = "pipedream_2bw"

    def __post_init__(self):
        _check_steps(self)

    def table(self, num_stages: int, num_microbatches: int) -> Schedule:
        """See `Asynchronous`."""
        least = 2 * (num_stages - 1)
        if num_microbatches < least:
            raise ValueError(
                f"accumulate={num_microbatches}: schedule={self.name!r} keeps two "
                f"versions of the parameters, which suffice for at least {least} "
                f"micro-batches, 2 (pipe - 1), with pipe={num_stages}; use as many, or "
                "schedule='pipemare', which takes any number."
            )
        return make_steady(self.name, num_stages, num_microbatches)


@dataclasses.dataclass(frozen=True)
class PipeMare(Asynchronous):
    """Forwards and backwards use the newest parameters; nothing is stashed.

    Two means against the delay. The update of stage s is divided by the delay of its
    forwards, tau = (2 (P - 1) - s) / M updates, where that is above 1:
    ``lr / tau ** (1 - min(k / annealing_steps, 1))`` at update k. And a backward uses
    parameters corrected to what its forward saw: ``w - (tau - s / M) d``, with d the
    moving average of the updates, of weight ``decay ** (1 / (tau - s / M))``.

    Attributes:
      annealing_steps: K; 0 for the rate as it is.
      decay: D of the average, above 0 and below 1; None for backwards with the newest
        parameters, without a correction.
      synchronous_steps: steps at the beginning without delay.
    """

    annealing_steps: int = 1000
    decay: float | None = 0.135
    synchronous_steps: int = 0
    name = "pipemare"

    def __post_init__(self):
        _check_steps(self)
        if self.annealing_steps < 0:
            raise ValueError(
                f"PipeMare: annealing_steps={self.annealing_steps} must be at least 0; "
                "a quarter of the run is a good first choice."
            )
        if self.decay is not None and not 0 < self.decay < 1:
            raise ValueError(
                f"PipeMare: decay={self.decay} must be above 0 and below 1, such as "
                "0.135; or None for no correction."
            )

    def table(self, num_stages: int, num_microbatches: int) -> Schedule:
        """See `Asynchronous`."""
        return make_steady(self.name, num_stages, num_microbatches)

    def forward_delay(self, stage: np.ndarray, schedule: Schedule) -> np.ndarray:
        """tau: updates between a stage's forward and that of its batch, on average."""
        total = 2 * (schedule.num_stages - 1)
        return (total - stage) / schedule.num_microbatches

    def discrepancy(self, stage: np.ndarray, schedule: Schedule) -> np.ndarray:
        """Updates between a stage's forward and its backward, on average."""
        total = 2 * (schedule.num_stages - 1)
        return (total - 2 * stage) / schedule.num_microbatches


def make_steady(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the M ticks of a step in the steady state; none has an idle stage.

    Args:
      name: of the schedule.
      num_stages: P, at least 2.
      num_microbatches: M, at least 1.

    Returns:
      A schedule whose `Schedule.delay` is D: its micro-batches are those of D + 1
      batches, the oldest first, which ends.
    """
    P, M = num_stages, num_microbatches
    forward, backward = empty(M, P), empty(M, P)
    ticks, stages = np.arange(M)[:, None], np.arange(P)[None, :]
    forward[:, :, 0] = ticks + 2 * (P - 1) - stages
    backward[:, :, 0] = ticks + stages
    forward[:, :, 1] = backward[:, :, 1] = 0
    delay = -(-2 * (P - 1) // M)
    return Schedule(name, P, M, 1, forward, backward, empty(M, P, 0), delay)


def _check_steps(own: Asynchronous) -> None:
    if own.synchronous_steps < 0:
        raise ValueError(
            f"{type(own).__name__}: synchronous_steps={own.synchronous_steps} must be "
            "at least 0."
        )
