"""When must a run end early: at a signal, on all processes at the same step.

Schedulers send SIGTERM before they take a machine away; Slurm can be configured to send
SIGUSR1 some time before (``--signal=USR1@120``).
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


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
    listens to SIGTERM and agrees on a step; SIGUSR1 is forwarded as SIGTERM. Outside
    the main thread Python allows no handlers: there SIGUSR1 is ignored, and in a single
    process SIGTERM too.
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
          The signal's name; None to continue.
        """
        if self._alone:
            return self._asked
        is_due = multihost_utils.reached_preemption_sync_point(step)
        return "SIGTERM" if is_due else None
