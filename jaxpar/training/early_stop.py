"""When does a run end before its last step: once its held-out loss no longer falls."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxpar.checkpoint import Keep
from jaxpar.checkpoint.retention import as_keep


class Standing(NamedTuple):
    """How a run's evaluations stand.

    Attributes:
      best_step: of the last one that improved; None if none is finite.
      since: evaluations after it.
    """

    best_step: int | None
    since: int


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """End a run whose held-out loss has not improved for some evaluations.

    An evaluation improves if its loss is below that of the last one that improved by
    more than `min_delta`; one that is not finite doesn't. The first one counts too.

    Attributes:
      patience: evaluations without an improvement after which the run ends.
      min_delta: in the unit of the loss.

    Raises:
      ValueError: if a number is out of its range.

    Example:
      >>> losses = {0: 5.0, 10: 3.0, 20: 2.95, 30: 3.1}
      >>> EarlyStop(patience=2, min_delta=0.1).standing(losses)
      Standing(best_step=10, since=2)
    """

    patience: int
    min_delta: float = 0.0

    def __post_init__(self):
        if self.patience < 1:
            raise ValueError(
                f"patience={self.patience} must be at least 1 evaluation; None to "
                "train to the last step."
            )
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(
                f"min_delta={self.min_delta} must be at least 0, in the unit of the "
                "loss."
            )

    def standing(self, losses: Mapping[int, float]) -> Standing:
        """How evaluations stand.

        Args:
          losses: step -> its held-out loss.
        """
        best, since = None, 0
        for step in sorted(losses):
            below = math.inf if best is None else losses[best] - self.min_delta
            is_better = losses[step] < below and math.isfinite(losses[step])
            best, since = (step, 0) if is_better else (best, since + 1)
        return Standing(best, since)

    def kept(self, keep: int | Keep | None) -> Keep:
        """The rule `keep`, with the best checkpoint."""
        rule = as_keep(keep)
        return dataclasses.replace(rule, best=max(rule.best, 1))


def make_early_stop(patience: int | None, min_delta: float) -> EarlyStop | None:
    """Read the flags of a start.

    Args:
      patience: as `EarlyStop` takes it; None for no early stop.
      min_delta: likewise.

    Returns:
      The rule; None for none.

    Raises:
      ValueError: as `EarlyStop`, or if `min_delta` is given without `patience`.
    """
    if patience is None and min_delta:
        raise ValueError(f"min_delta={min_delta} needs patience=, such as 5.")
    return None if patience is None else EarlyStop(patience, min_delta)
