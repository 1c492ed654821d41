"""When must a run end early: at a signal, by all processes at the same step.

SIGTERM is what schedulers send before they take a machine away; SIGUSR1 what Slurm is
told to send some time before (``--signal=USR1@120``).
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class RunStopped(SystemExit):
    """A run ended before its last step; scripts end with its code.

    Attributes:
      code: of `jaxpar.exit_codes`: `STOPPED` (saved at a signal: start it again to go
        on), `SAVE_FAILED`, `CORRUPT` or `DIVERGED`.
      why: in words.
    """

    def __init__(self, code: int, why: str):
        super().__init__(code)
        self.why = why

    def __str__(self) -> str:
        return self.why


class StopSignals:
    """Notices signals that ask for an end, within a ``with`` block.

    In one process the handlers are Python's. In several, jax's coordination service
    listens to SIGTERM and agrees on a step; SIGUSR1 is passed on as SIGTERM. Outside
    the main thread, where Python takes no handlers, SIGUSR1 is left alone, and SIGTERM
    in one process.
    """

    def __init__(self):
        self._alone = jax.process_count() == 1
        self._before: dict[int, Any] = {}
        self._asked: str | None = None

    def __enter__(self) -> "StopSignals":
        wanted = [signal.SIGUSR1, *([signal.SIGTERM] if self._alone else [])]
        is_main = threading.current_thread() is threading.main_thread()
        for number in wanted if is_main else ():
            self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, _: FrameType | None) -> None:
        if self._alone:
            self._asked = signal.Signals(number).name
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> str | None:
        """Whether to save and end after a step; all processes ask at every step.

        Args:
          step: the step that was taken.

        Returns:
          The signal's name; None to go on.
        """
        if self._alone:
            return self._asked
        is_due = multihost_utils.reached_preemption_sync_point(step)
        return "SIGTERM" if is_due else None
