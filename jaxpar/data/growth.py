"""How far has a number grown by a step: the length of rows, or a layer's tokens?"""

import bisect
import dataclasses
import itertools
from typing import Protocol, runtime_checkable


@runtime_checkable
class Growing(Protocol):
    """A number that grows by step, of which few values are taken."""

    @property
    def values(self) -> tuple[int, ...]:
        """All values, ascending; the last one is that of all steps in the end."""
        ...

    @property
    def starts(self) -> tuple[int, ...]:
        """For each value, the first step that has it or a later one."""
        ...


@dataclasses.dataclass(frozen=True)
class Growth:
    """A number that grows as a root of the step, down to a multiple.

    At step t it is ``(t / steps)^(1 / root) (end - start) + start``, rounded down to a
    multiple of `multiple`.

    Attributes:
      start: at step 0.
      end: from step `steps` on.
      steps: that it grows for, at least 1.
      root: 1 is linear; 2, the square root, grows faster at first.
      multiple: that all values are multiples of; each is a program to compile.

    Raises:
      ValueError: if a number is out of range, or not a multiple.

    Source: Li et al., "The Stability-Efficiency Dilemma" (2022), and DeepSpeed's
    curriculum schedules "fixed_linear" and "fixed_root".

    Example:
      >>> growth = Growth(64, 256, steps=100, multiple=64)
      >>> growth.values, growth.starts
      ((64, 128, 192, 256), (0, 34, 67, 100))
      >>> [value_at(growth, step) for step in (0, 33, 34, 99, 1000)]
      [64, 64, 128, 192, 256]
    """

    start: int
    end: int
    steps: int
    root: float = 1.0
    multiple: int = 64

    def __post_init__(self):
        for name in ("steps", "multiple"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Growth: {name}={getattr(self, name)} must be at least 1."
                )
        if not self.root > 0:
            raise ValueError(
                f"Growth: root={self.root} must be above 0; 1 is linear, 2 the square "
                "root."
            )
        for name in ("start", "end"):
            value = getattr(self, name)
            if value < 1 or value % self.multiple:
                raise ValueError(
                    f"Growth: {name}={value} must be a positive multiple of multiple="
                    f"{self.multiple}; change one of the two."
                )
        if self.start > self.end:
            raise ValueError(
                f"Growth: start={self.start} must be at most end={self.end}."
            )

    @property
    def values(self) -> tuple[int, ...]:
        """See `Growing`."""
        return tuple(range(self.start, self.end + 1, self.multiple))

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Growing`."""
        return tuple(
            bisect.bisect_left(range(self.steps), value, key=self._grown)
            for value in self.values
        )

    def _grown(self, step: int) -> float:
        return (step / self.steps) ** (1 / self.root) * (
            self.end - self.start
        ) + self.start


@dataclasses.dataclass(frozen=True)
class GrowthInSteps:
    """A number that has each of some values for some steps.

    Attributes:
      values: ascending.
      until: for each value but the last one, the first step that has the next.

    Raises:
      ValueError: if there is no value, or numbers don't ascend or don't fit.

    Source: DeepSpeed's curriculum schedule "fixed_discrete".

    Example:
      >>> grown = GrowthInSteps((128, 256, 1024), until=(1000, 3000))
      >>> [value_at(grown, step) for step in (0, 999, 1000, 2999, 3000)]
      [128, 128, 256, 256, 1024]
    """

    values: tuple[int, ...]
    until: tuple[int, ...]

    def __post_init__(self):
        if len(self.until) != len(self.values) - 1:
            raise ValueError(
                f"GrowthInSteps: until={self.until} must have a step for each of "
                f"values={self.values} but the last one, which has no end."
            )
        for name in ("values", "until"):
            numbers = getattr(self, name)
            if min(numbers, default=1) < 1 or any(
                b <= a for a, b in itertools.pairwise(numbers)
            ):
                raise ValueError(
                    f"GrowthInSteps: {name}={numbers} must be positive and ascend."
                )

    @property
    def starts(self) -> tuple[int, ...]:
        """See `Growing`."""
        return (0, *self.until)


def value_at(schedule: Growing, step: int) -> int:
    """The value of a schedule.

    Args:
      schedule: the schedule.
      step: steps taken before.
    """
    return schedule.values[bisect.bisect_right(schedule.starts, step) - 1]
