"""From which bandwidth on is a technique of no use?

The seconds of a step are fitted by compute + bytes / bandwidth, a line in 1 /
bandwidth. Where the lines of two techniques meet, they take the same time.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from scipy.optimize import nnls


@dataclasses.dataclass(frozen=True)
class Fit:
    """A step's time by bandwidth.

    Attributes:
      compute: seconds on a link without a limit.
      sent: bytes that wait for each other on a host's link.
      error: the largest error of a measured point, a fraction of its seconds.
    """

    compute: float
    sent: float
    error: float

    def seconds(self, megabits: float) -> float:
        """Of a step on links of so many 10^6 bits a second; may be infinite."""
        return self.compute + 8 * self.sent / (1e6 * megabits)


def fit(seconds: Mapping[float, float]) -> Fit:
    """Fit a line that neither term makes negative, by least squares of relative errors.

    Args:
      seconds: rate of the links in 10^6 bits a second, infinite for no limit -> seconds
        of a step; two or more.

    Example:
      >>> fit({math.inf: 0.5, 8.0: 2.5})
      Fit(compute=0.5, sent=2000000.0, error=0.0)
    """
    taken = np.array(list(seconds.values()))
    slow = np.array([8e-6 / rate for rate in seconds])
    line = np.stack([np.ones_like(slow), slow], axis=1) / taken[:, None]
    (compute, sent), _ = nnls(line, np.ones_like(taken))
    error = np.abs(line @ [compute, sent] - 1).max()
    return Fit(*(round(float(x), 9) for x in (compute, sent, error)))


def crossover(plain: Fit, other: Fit) -> float:
    """Rate in 10^6 bits a second from which on plain is faster.

    Args:
      plain: the one that sends more.
      other: the one that sends less.

    Returns:
      The rate; infinite if plain never is, 0 if it always is.

    Example:
      >>> crossover(Fit(0.5, 2e6, 0.0), Fit(1.5, 0.0, 0.0))
      16.0
    """
    if other.compute <= plain.compute:
        return math.inf
    return max(0.0, 8e-6 * (plain.sent - other.sent) / (other.compute - plain.compute))
