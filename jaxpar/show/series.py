"""Numbers over steps, and fewer of them: to draw a million steps, and to smooth."""

import dataclasses
import itertools

import numpy as np

_TRIMMED_FROM = 50
"""Of more values than this, the outermost do not set the scale: they may be spikes."""


@dataclasses.dataclass(frozen=True)
class Series:
    """A number over steps; values may be non-finite."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> "Series":
        """The part with finite values."""
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.values[kept])


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """Choose points to draw: the lowest and highest of equal stretches.

    Args:
      values: finite.
      most: points, at most.

    Returns:
      Their indices, ascending; spikes are among them, and the ends.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(most // 2, 2)).astype(int)
    chosen = {0, count - 1}
    for begin, end in itertools.pairwise(edges):
        part = values[begin:end]
        chosen |= {int(begin + part.argmin()), int(begin + part.argmax())}
    return np.array(sorted(chosen))


def smooth(series: Series, most: int = 300) -> Series:
    """The mean around each of some points, over a fiftieth of the series.

    Args:
      series: the points; non-finite values are left out of the means.
      most: points of the result, at most.
    """
    count = len(series)
    half = max(2, count // 100)
    centres = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    means = np.full(len(centres), np.nan)
    for at, centre in enumerate(centres):
        # At the start, where a loss is steep, no farther to one side than the other.
        before = min(half, centre)
        window = series.values[centre - before : centre + before + 1]
        window = window[np.isfinite(window)]
        if len(window) > _TRIMMED_FROM:
            window = np.clip(window, *np.percentile(window, (1, 99)))
        if len(window):
            means[at] = window.mean()
    return Series(series.steps[centres], means)
