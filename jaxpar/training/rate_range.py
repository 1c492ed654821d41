"""Between which learning rates does a loss fall? The rule that reads a range test."""

import dataclasses
from collections.abc import Sequence
from typing import Any, SupportsFloat

import numpy as np

LEAST_STEPS = 10
"""Steps with finite losses, fewer of which say nothing."""
_SMOOTHED = 20
"""The smoothing window is this part of the steps."""


@dataclasses.dataclass(frozen=True)
class RateRange:
    """The rates between which a loss fell.

    Attributes:
      low: the lowest rate at which the loss has clearly begun to fall.
      high: the last rate before the loss rose; that of its least value.
      has_risen: whether the loss rose at all; if not, `high` is only what the test
        reached.
    """

    low: float
    high: float
    has_risen: bool


def find_rate_range(
    rates: Sequence[SupportsFloat] | np.ndarray,
    losses: Sequence[SupportsFloat] | np.ndarray,
    *,
    share: float = 0.1,
) -> RateRange:
    """Find the rates between which the loss of a range test falls.

    The losses up to the first that is not finite are smoothed by `smoothed`. Their fall
    is from the first to the least. `RateRange.low` is the rate at which `share` of it
    is reached. After that, the loss has risen where it is above the least so far by
    `share` of the fall, or where it is not finite; `RateRange.high` is the rate of the
    least loss before, or of all if it has not risen.

    Args:
      rates: learning rate of each step, which rises.
      losses: training loss of each step.
      share: fraction of the fall that is taken for a change, not for noise.

    Returns:
      The range.

    Raises:
      ValueError: if the numbers differ in length or a rate is below the one before,
        `share` is not between 0 and 1, there are fewer than 10 finite losses, or the
        loss does not fall.

    Example:
      >>> rates = np.linspace(0.01, 1.0, 100)
      >>> losses = np.where(rates < 0.6, 3.0 - 2.0 * rates, 1.8 + 9 * (rates - 0.6))
      >>> found = find_rate_range(rates, losses)
      >>> print(f"{found.low:.2f} to {found.high:.2f}")
      0.08 to 0.58

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2017),
    section 3.3, which takes the rates by eye from a plot of the accuracy.
    """
    steps, values = np.asarray(rates, np.float64), np.asarray(losses, np.float64)
    _require_readable(steps, values, share)
    bad = np.flatnonzero(~np.isfinite(values))
    count = bad[0] if len(bad) else len(values)
    if count < LEAST_STEPS:
        raise ValueError(
            f"losses: {count} are finite before the first that is not; a range needs "
            f"{LEAST_STEPS}. Begin at a lower rate, or raise it over more steps."
        )
    smooth = smoothed(values[:count])
    change = share * (smooth[0] - smooth.min())
    if change <= 0:
        raise ValueError(
            f"losses: they never fall below the first, {smooth[0]:.4g} at a rate of "
            f"{steps[0]:.3g}; begin at a lower rate."
        )
    begin = int(np.argmax(smooth <= smooth[0] - change))
    least = np.minimum.accumulate(smooth)
    rises = np.flatnonzero(smooth[begin:] > least[begin:] + change)
    end = begin + int(rises[0]) if len(rises) else count
    high = int(np.argmin(smooth[:end]))
    has_risen = bool(len(rises) or len(bad))
    return RateRange(float(steps[begin]), float(steps[high]), has_risen)


def smoothed(losses: Any) -> np.ndarray:
    """Average each loss with its neighbours: a twentieth of the steps around it.

    At both ends the window is cut off.
    """
    losses = np.asarray(losses, np.float64)
    window = np.ones(2 * (len(losses) // (2 * _SMOOTHED)) + 1)
    count = np.convolve(np.ones(len(losses)), window, "same")
    return np.convolve(losses, window, "same") / count


def _require_readable(rates: np.ndarray, losses: np.ndarray, share: float) -> None:
    if rates.shape != losses.shape or rates.ndim != 1:
        raise ValueError(
            f"rates: shape {rates.shape}, losses: {losses.shape}; give one of each for "
            "each step."
        )
    if not (np.diff(rates) >= 0).all():
        raise ValueError(
            "rates: they fall; a range test raises them from step to step "
            "(jaxpar.optim.lr_range_test)."
        )
    if not 0 < share < 1:
        raise ValueError(f"share={share} must be between 0 and 1, such as 0.1.")
