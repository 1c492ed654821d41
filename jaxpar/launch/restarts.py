"""How often is a run started again, and with which hosts?"""

import collections
import signal
import time
from collections.abc import Mapping

from jaxpar.launch.rendezvous import Outcome

LAST_FAILURE = 3
"""The failure of a host after which the run goes on without it."""
GONE = Outcome("failed", 1, "its supervisor does not answer", [])
"""The outcome of a host whose supervisor is lost."""

_HOUR, _DAY = 3600.0, 86400.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class RestartBudget:
    """Restarts within an hour; pauses that double while there is no progress.

    A restart comes back after an hour, or when the run has saved more: with an attempt
    that went on from a later step than all before it.

    Args:
      restarts: allowed within any hour without a step that was saved.
    """

    def __init__(self, restarts: int):
        if restarts < 0:
            raise ValueError(f"restarts is {restarts}; it must be at least 0")
        self._restarts = restarts
        self._times: collections.deque[float] = collections.deque()
        self._pause = _FIRST_PAUSE
        self._saved: int | None = None

    def spend(self, *, progressed: bool, resumed: int = 0) -> float | None:
        """Use one restart.

        Args:
          progressed: whether the run has advanced since the last one.
          resumed: the step that the attempt which failed went on from; 0 for the start.

        Returns:
          Seconds to wait before it; None if none is left.
        """
        now = time.monotonic()
        while self._times and now - self._times[0] > _HOUR:
            self._times.popleft()
        if self._saved is not None and resumed > self._saved and self._times:
            self._times.popleft()
        self._saved = max(resumed, self._saved or 0)
        if len(self._times) >= self._restarts:
            return None
        self._times.append(now)
        self._pause = (
            _FIRST_PAUSE if progressed else min(2 * self._pause, _LONGEST_PAUSE)
        )
        return self._pause


class HostFailures:
    """Counts the failures of each host within a day."""

    def __init__(self):
        self._times: dict[int, list[float]] = {}

    def count(self, outcomes: Mapping[int, Outcome]) -> list[int]:
        """Count an attempt's failures; the hosts that have failed too often by now.

        Args:
          outcomes: of the attempt, by host.
        """
        now = time.monotonic()
        for host in failed_hosts(outcomes):
            recent = [t for t in self._times.get(host, []) if now - t < _DAY]
            self._times[host] = [*recent, now]
        return [h for h, times in self._times.items() if len(times) >= LAST_FAILURE]


def failed_hosts(outcomes: Mapping[int, Outcome]) -> list[int]:
    """The hosts whose own failure ended an attempt, as far as that is certain.

    Workers fail when others have: those of many hosts at once with an error, which says
    nothing of who was the first. A supervisor that is lost, a worker that was killed by
    a signal (but SIGABRT, by which JAX ends those that lost another), and a host that
    alone has failed are certain.

    Args:
      outcomes: of an attempt, by host.
    """
    own = [h for h, each in outcomes.items() if each.kind in ("failed", "stalled")]
    gone = [h for h in own if outcomes[h] == GONE]
    killed = [
        h
        for h in own
        if any(
            (end.code or 0) < 0 and end.code != -signal.SIGABRT
            for end in outcomes[h].workers
        )
    ]
    return gone or killed or (own if len(own) == 1 else [])
