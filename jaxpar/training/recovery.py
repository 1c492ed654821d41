"""When has a run gone wrong? The rules that check a step's metrics."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from jaxpar.checkpoint.saving import REREAD
from jaxpar.types import Batch, Metrics

_MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_LEAST_SPREAD = 0.01
"""Fraction of the median: the least deviation, for a loss that hardly changes."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What a run does about bad numbers, failed saves and corrupt replicas."""

    spike: float = 10.0
    """A loss this many robust standard deviations above the median of the last ones is
    a spike: the run rolls back and skips its batch. 0: never."""
    window: int = 64
    """Losses that the rule looks back on; it starts with half of them."""
    nonfinite: int = 3
    """Consecutive steps without finite numbers, each skipped, after which the run rolls
    back and skips their batches."""
    rollbacks: int = 3
    """Rollbacks after which a run stops instead."""
    probe_every: int = 100
    """Steps between comparisons of replicated arrays over the devices. 0: never."""
    replay_every: int = 0
    """Steps between those that are taken again on shifted devices and compared, and the
    first after each start: finds errors in shards that no other device has. 0: never.
    """
    compare_every: int = 4
    """Steps between comparisons of the workers' speed. 0: never."""
    slow: float = 1.5
    """A worker that takes this many times the others' median, in three consecutive
    comparisons, is reported."""
    reread: float = REREAD
    """Share of a saved state that is read back and compared with what the devices held,
    another part at each save. 1: all."""
    memory_every: int = 0
    """Steps between copies of the state in the memory of this host and of another
    (`jaxpar.checkpoint.MemoryTier`): a lost worker or host then costs the steps since
    the last copy, not those since the last checkpoint. 0: never."""
    end_seconds: float = 540.0
    """Seconds from a stop signal until the run has ended, at most: then it ends with
    code 74, whatever a save waits for. 0: no limit."""
    on_failed_save: Literal["stop", "warn"] = "stop"
    """After a failed save: exit with code 74, or a warning."""

    def __post_init__(self):
        for name, least in (
            ("spike", 0),
            ("window", 4),
            ("nonfinite", 1),
            ("rollbacks", 0),
            ("probe_every", 0),
            ("replay_every", 0),
            ("compare_every", 0),
            ("slow", 1),
            ("reread", 0),
            ("memory_every", 0),
            ("end_seconds", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"recovery: {name}={value} must be at least {least}.")
        if self.reread > 1:
            raise ValueError(f"recovery: reread={self.reread} must be at most 1, all.")


@dataclasses.dataclass(frozen=True)
class Taken:
    """A step that was dispatched and is not checked yet.

    Attributes:
      step: its number.
      ordinal: number of its batch, counted over all batches that the run has drawn.
      rows: (start, stop) of the batch in the data, counted from the start.
      batch: the batch.
      metrics: on the device.
    """

    step: int
    ordinal: int
    rows: tuple[int, int]
    batch: Batch
    metrics: Metrics


class StepMonitor:
    """Checks the metrics of one step after the other.

    Args:
      recovery: the rules.
      scales_loss: whether the loss scale handles gradients that overflow.
    """

    def __init__(self, recovery: Recovery, *, scales_loss: bool):
        self._recovery, self._scales_loss = recovery, scales_loss
        self._losses: collections.deque[float] = collections.deque(
            maxlen=recovery.window
        )
        self.in_a_row = 0

    def begin_after(self, steps: Iterable[Sequence[float]]) -> None:
        """Reset, and take in (loss, grad_norm) of the previous steps, in order."""
        self._losses.clear()
        self._losses.extend(loss for loss, norm in steps if self.is_finite(loss, norm))
        self.in_a_row = 0

    def is_finite(self, loss: float, grad_norm: float) -> bool:
        """Whether a step's metrics are finite; if not, the step skipped its update."""
        return math.isfinite(loss) and (self._scales_loss or math.isfinite(grad_norm))

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Take in a step's metrics.

        Args:
          loss: of the step.
          grad_norm: before clipping.

        Returns:
          Why the run must roll back; None if it continues.
        """
        if math.isnan(loss) and grad_norm == 0:
            return None  # An asynchronous pipeline fills: no batch has a loss yet.
        if not self.is_finite(loss, grad_norm):
            self.in_a_row += 1
            if self.in_a_row < self._recovery.nonfinite:
                return None
            return f"{self.in_a_row} consecutive steps without finite numbers"
        self.in_a_row = 0
        score = self.score(loss)
        if score is not None and 0 < self._recovery.spike < score:
            median = statistics.median(self._losses)
            return (
                f"loss {loss:.4g} is {score:.3g} robust deviations above the median "
                f"{median:.4g} of the last {len(self._losses)}"
            )
        self._losses.append(loss)
        return None

    def score(self, loss: float) -> float | None:
        """Robust z-score of a loss among the last ones; None if there are too few."""
        if len(self._losses) < self._recovery.window // 2:
            return None
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(each - median) for each in self._losses)
        spread = max(_MAD_TO_SIGMA * deviation, _LEAST_SPREAD * abs(median), 1e-12)
        return (loss - median) / spread
