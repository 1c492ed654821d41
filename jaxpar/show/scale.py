"""Which values does a chart show, and where?"""

import dataclasses
import math

import numpy as np

_TICKS = 5
_LOG_FROM = 100.0
"""The scale is logarithmic where high percentiles are so many times the low ones."""
_LARGEST = 1e300
_SPIKE = 8.0
"""Values so many times as far above the lowest as the high percentile are spikes."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """The values that a chart shows, from bottom to top."""

    low: int | float
    high: int | float
    is_log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """Fractions of the height, from the bottom; values above `high` are at it."""
        low, high = self.low, self.high
        if self.is_log:
            low, high = math.log(low), math.log(high)
            values = np.log(np.maximum(values, self.low))
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def ticks(self) -> list[float]:
        """The values that are labelled."""
        if not self.is_log:
            return nice_numbers(self.low, self.high)
        low, high = math.log10(self.low), math.log10(self.high)
        powers = range(math.floor(low), math.floor(high) + 1)
        within = [10.0**p for p in powers if self.low <= 10.0**p <= self.high]
        return within[:: max(1, math.ceil(len(within) / _TICKS))]


def choose_scale(values: np.ndarray, *, from_zero: bool = False) -> Scale:
    """Choose what a scale shows: all values but spikes, which would flatten the rest.

    Args:
      values: finite, at least one.
      from_zero: begin at 0.
    """
    values = np.where(np.abs(values) < 1 / _LARGEST, 0.0, values)
    ordered = np.sort(np.clip(values, -_LARGEST, _LARGEST))
    low, high = float(ordered[0]), float(ordered[-1])
    usual = float(ordered[int(0.98 * (len(ordered) - 1))])
    least = float(ordered[int(0.02 * (len(ordered) - 1))])
    if not from_zero and low > 1 / _LARGEST and usual > _LOG_FROM * least:
        return Scale(low / 1.2, high * 1.2, is_log=True)
    if from_zero:
        low = min(low, 0.0)
    if high - low > _SPIKE * (usual - low) > 0:
        high = low + 2.5 * (usual - low)
    around = (high - low or abs(high) or 1.0) * 0.05
    return Scale(low - (0.0 if from_zero and low == 0 else around), high + around)


def nice_numbers(low: int | float, high: int | float) -> list[float]:
    """Up to six round numbers between two.

    Example:
      >>> nice_numbers(0, 60)
      [0.0, 20.0, 40.0, 60.0]
    """
    if not low < high:
        return [low]
    least = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.10g}") for k in range(first, last + 1)]
