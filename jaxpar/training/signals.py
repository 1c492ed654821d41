"""When must a run end early: at a signal, on all processes at the same step.

Schedulers send SIGTERM before they take a machine away; Slurm can be configured to send
SIGUSR1 some time before (``--signal=USR1@120``). Ctrl-C is SIGINT, a terminal that is
closed sends SIGHUP.
"""

import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxpar.launch.agreement import service
from jaxpar.launch.exit_codes import SAVE_FAILED
from jaxpar.launch.stop_signals import STOPPING, listen

_POLL_SECONDS, _SAYING_SECONDS = 1.0, 5.0
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""Under which jax's service has the time of a signal."""
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

    Args:
      seconds: from a signal to the end of the block, at most; 0 for no limit. Then the
        process ends with code 74, also where a disk or another process hangs.
      note: writes down why; it is given a few seconds.
      end: ends the process.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        note: Callable[[str], object] = lambda why: None,
        end: Callable[[int], object] = os._exit,
    ):
        self._seconds, self._note, self._end = seconds, note, end
        self._over, self._wakeup = threading.Event(), (-1, -1)
        self._alone = jax.process_count() == 1
        self._before: dict[int, Any] = {}
        self._asked: str | None = None

    def __enter__(self) -> "StopSignals":
        is_main = threading.current_thread() is threading.main_thread()
        for number in STOPPING if is_main else ():
            if self._alone or number != signal.SIGTERM:
                self._before[number] = listen(number, self._notice)
        if self._seconds:
            # A handler runs when the main thread is back from the disk; this does not.
            heard, written = os.pipe()
            os.set_blocking(written, False)
            set_fd = functools.partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
            self._wakeup = written, set_fd(written) if is_main else -1
            target = functools.partial(self._limit, heard)
            threading.Thread(target=target, name="stop", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._seconds:
            if threading.current_thread() is threading.main_thread():
                signal.set_wakeup_fd(self._wakeup[1])
            os.close(self._wakeup[0])
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

    def _limit(self, heard: int) -> None:
        """End the process if the block has not ended in time."""
        with open(heard, "rb", buffering=0) as file:
            while not self._over.is_set() and (self._alone or not _is_noticed()):
                if select.select([file], [], [], _POLL_SECONDS)[0]:
                    numbers = file.read(64)
                    if not numbers or set(numbers) & set(STOPPING):
                        break
        if self._over.wait(self._seconds):
            return
        why = (
            f"a signal asked for an end {self._seconds:g} s ago, and this process "
            "still waits, for a disk or another process (stacks are above): it ends "
            f"with code {SAVE_FAILED}. Checkpoints that were complete stay so: start "
            "it again to resume"
        )
        # On a disk that hangs this may never return.
        noting = threading.Thread(target=self._note, args=(why,), daemon=True)
        noting.start()
        noting.join(_SAYING_SECONDS)
        # The main thread is the last of at most a hundred: it is written once more.
        own = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(own))
        with contextlib.suppress(OSError):  # It may be closed.
            faulthandler.dump_traceback(2, all_threads=True)
            os.write(2, f"The main thread:\n{stack}{why}\n".encode())
        self._end(SAVE_FAILED)


def _is_noticed() -> bool:
    """Whether any process of a run has been sent SIGTERM."""
    client = service()
    try:
        return client is not None and bool(client.key_value_try_get(_NOTICE))
    except jax.errors.JaxRuntimeError:  # There is no notice.
        return False
