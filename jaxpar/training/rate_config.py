"""Which flags does a recipe have for its learning rate?"""

import dataclasses
from typing import Literal

import optax

from jaxpar.optim.schedules import Decay, lr_range_test, warmup_then
from jaxpar.training.rate_range import LEAST_STEPS
from jaxpar.training.recovery import Recovery

RANGE = 10.0
"""A range test goes from the learning rate divided by this, to that times this."""


@dataclasses.dataclass(frozen=True)
class RateConfig:
    """Fields for a recipe's config to inherit."""

    decay: Decay | Literal["range"] = "cosine"
    """Of the learning rate, after a linear warm-up over a tenth of the schedule; or
    range: a test that raises it from a tenth to ten times --learning-rate."""
    schedule_steps: int | None = None
    """Of the learning rate's schedule; by default the steps at the first start."""

    def make_schedule(self, peak: float, steps: int) -> optax.Schedule:
        """Make the schedule.

        Args:
          peak: the learning rate.
          steps: of the run, for a config without `schedule_steps`.

        Returns:
          A rate that warms up over a tenth of the steps and then falls to 0 (not by
          "inverse_sqrt"), or that of the range test.

        Raises:
          ValueError: if `peak` is not above 0, or a range test is too short.

        Example:
          >>> schedule = RateConfig(decay="linear").make_schedule(0.4, 20)
          >>> [round(float(schedule(step)), 4) for step in (0, 2, 11, 20)]
          [0.0, 0.4, 0.2, 0.0]
        """
        steps = self.schedule_steps or steps
        if self.decay == "range":
            if steps < LEAST_STEPS:
                raise ValueError(
                    f"steps={steps}: a range test needs {LEAST_STEPS} at least, better "
                    "some hundreds; use --steps 300."
                )
            rise = RANGE**2 - 1.0
            return lr_range_test(peak / RANGE, steps, step_rate=rise)
        return warmup_then(self.decay, peak, steps=steps, warmup_steps=steps // 10)

    def recovering(self, recovery: Recovery) -> Recovery:
        """The rules of a run; in a range test nothing rolls back as the loss rises."""
        if self.decay != "range":
            return recovery
        return dataclasses.replace(recovery, spike=0.0, nonfinite=2**31)
