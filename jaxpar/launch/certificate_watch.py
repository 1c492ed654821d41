"""Do a host's certificates outlive its run: at each start, and daily while it runs?"""

import time
from collections.abc import Callable

from jaxpar.launch.worker_environment import Tls

_DAY_SECONDS = 86_400.0


def ended_certificates(tls: Tls | None, say: Callable[[str], None]) -> str | None:
    """Renew certificates that end soon, or say when they end.

    Args:
      tls: of this host.
      say: is given a line.

    Returns:
      Why that can't be done, if they have ended.
    """
    if tls is None:
        return None
    # Slow to import, and for hosts with certificates alone.
    from jaxpar.launch.certificates import keep_valid  # noqa: PLC0415

    try:
        keep_valid(tls, say)
    except ValueError as error:
        return str(error)
    return None


class CertificateWatch:
    """Looks after certificates once a day, for an attempt may outlive them.

    Workers that have joined go on; the next start needs valid ones.

    Args:
      tls: of this host.
      say: is given a line, on each day of the last third of the certificates' life.
    """

    def __init__(self, tls: Tls | None, say: Callable[[str], None]):
        self._tls, self._say = tls, say
        self._next = time.monotonic() + _DAY_SECONDS

    def look(self) -> None:
        """Look if a day is over; may be called as often as one likes."""
        if self._tls is None or time.monotonic() < self._next:
            return
        self._next += _DAY_SECONDS
        try:
            ended = ended_certificates(self._tls, self._say)
        except OSError as error:
            self._say(f"the certificates of --tls can't be read: {error}")
            return
        if ended:
            self._say(f"the run goes on, but its next start will be refused: {ended}")
