"""Which saved steps are kept, and which are deleted?"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Keep:
    """Steps to keep after a save: those that any of the rules names.

    Attributes:
      last: how many of the newest; at least 1, or None for all.
      every: steps divisible by this are kept forever; None for none.
      best: how many with the smallest metric.

    Example:
      >>> Keep(last=2, every=100).going({100: None, 110: None, 120: None, 130: None})
      [110]
    """

    last: int | None = 3
    every: int | None = None
    best: int = 0

    def __post_init__(self):
        for name in ("last", "every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(
                    f"keep: {name}={number} must be at least 1, or None for "
                    f"{'all' if name == 'last' else 'none'}."
                )
        if self.best < 0:
            raise ValueError(f"keep: best={self.best} must be at least 0.")

    def going(self, steps: Mapping[int, float | None]) -> list[int]:
        """Steps to delete, oldest first.

        Args:
          steps: step -> its metric, for the steps that can be restored.
        """
        if self.last is None:
            return []
        newest = sorted(steps)[-self.last :]
        measured = [step for step, metric in steps.items() if metric is not None]
        measured.sort(key=lambda step: (steps[step], -step))
        staying = {*newest, *measured[: self.best]}
        return [
            step
            for step in sorted(steps)
            if step not in staying and not (self.every and step % self.every == 0)
        ]


def as_keep(keep: int | Keep | None) -> Keep:
    """Convert a number, which means that many of the newest."""
    return keep if isinstance(keep, Keep) else Keep(last=keep)
