"""When must a run end early: at a signal, on all processes at the same step.

Schedulers send SIGTERM before they take a machine away; Slurm can be configured to send
SIGUSR1 some time before (``--signal=USR1@120``). Ctrl-C is SIGINT, a terminal that is
closed sends SIGHUP.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxpar.launch.stop_signals import STOPPING, listen

_SAID = b"SIGINT: saving, and ending; press Ctrl-C again to end at once\n"


class RunStopped(SystemExit):
    """A run ended before its last step; scripts exit with its code.

    Attributes:
      code: of `jaxpar.launch.exit_codes`: `STOPPED` (saved at a signal: start it
        again to resume), `SAVE_FAILED`, `CORRUPT`, `DIVERGED`, or `REPLACED` (another
        process has taken the run over).
      why: the reason, as text.
    """

    def __init__(self, code: int, why: str):
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return self.why


class StopSignals:
    """Notices signals that request an end, within a ``with`` block.

    In one process the handlers are Python's. In several, jax's coordination service
    listens to SIGTERM and agrees on a step; the others are forwarded as SIGTERM. A
    second SIGINT ends the program at once. Outside the main thread Python allows no
    handlers: there these signals do what they did before.
    """

    def __init__(self):
        self._alone = jax.process_count() == 1
        self._before: dict[int, Any] = {}
        self._asked: str | None = None

    def __enter__(self) -> "StopSignals":
        is_main = threading.current_thread() is threading.main_thread()
        for number in STOPPING if is_main else ():
            if self._alone or number != signal.SIGTERM:
                self._before[number] = listen(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])  # For the second one.
            # A handler may interrupt a print, which can't be begun again within itself.
            os.write(2, _SAID)
        if self._alone:
            self._asked = signal.Signals(number).name
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> str | None:
        """Whether to save and end after a step; all processes ask at every step.

        Args:
          step: the step that was taken.

        Returns:
          The signal's name; None to continue.
        """
        if self._alone:
            return self._asked
        is_due = multihost_utils.reached_preemption_sync_point(step)
        return "SIGTERM" if is_due else None
