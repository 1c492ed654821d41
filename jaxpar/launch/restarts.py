"""How often is a run started again?"""

import collections
import time

_HOUR = 3600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class RestartBudget:
    """Restarts within an hour; pauses that double while there is no progress.

    Args:
      restarts: allowed within any hour.
    """

    def __init__(self, restarts: int):
        if restarts < 0:
            raise ValueError(f"restarts is {restarts}; it must be at least 0")
        self._restarts = restarts
        self._times: collections.deque[float] = collections.deque()
        self._pause = _FIRST_PAUSE

    def spend(self, *, progressed: bool) -> float | None:
        """Use one restart.

        Args:
          progressed: whether the run has advanced since the last one.

        Returns:
          Seconds to wait before it; None if none is left.
        """
        now = time.monotonic()
        while self._times and now - self._times[0] > _HOUR:
            self._times.popleft()
        if len(self._times) >= self._restarts:
            return None
        self._times.append(now)
        self._pause = (
            _FIRST_PAUSE if progressed else min(2 * self._pause, _LONGEST_PAUSE)
        )
        return self._pause
