"""When is a failed save tried again, and when does the run end by it?"""

import time
from collections.abc import Callable

from jaxpar.launch.own_files import pauses


class Saves:
    """Saves of a run, in the background until one fails; then until they succeed.

    Args:
      begin: starts to save the current state.
      wait: returns once what was started is on the disk.
      failed: takes the reason of each failure.
      stop: ends the run, for the last reason, once the time to try again is over; None
        to go on without that save.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        wait: Callable[[], None],
        failed: Callable[[str], None],
        stop: Callable[[str], None] | None,
    ):
        self._begin, self._wait, self._failed, self._stop = begin, wait, failed, stop
        self._why = ""

    def start(self) -> None:
        """Start a save, once the one before is on the disk."""
        is_sound = self.have_ended()
        if self._stop is None:
            self._succeeds(self._begin)
        elif not (is_sound and self._succeeds(self._begin)):
            self._repeat(self._stop)

    def wait(self) -> None:
        """Return once the state that was saved last is on the disk."""
        if not self.have_ended() and self._stop is not None:
            self._repeat(self._stop)

    def have_ended(self) -> bool:
        """Wait for a save; whether it succeeded."""
        return self._succeeds(self._wait)

    def _repeat(self, stop: Callable[[str], None]) -> None:
        # Counted in pauses: the clocks of the processes may differ.
        for pause in pauses():
            time.sleep(pause)
            if self._succeeds(self._begin) and self._succeeds(self._wait):
                return
        stop(self._why)

    def _succeeds(self, save: Callable[[], None]) -> bool:
        try:
            save()
        except OSError as error:
            self._why = str(error)
            self._failed(self._why)
            return False
        return True
