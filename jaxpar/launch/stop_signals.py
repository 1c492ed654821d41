"""At which signals does a run save and end? Known without JAX, for supervisors."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def listen(number: int, handler: Callable[[int, FrameType | None], None]) -> Any:
    """Set a signal's handler, unless the signal is ignored, as SIGHUP under nohup.

    Args:
      number: the signal's.
      handler: as `signal.signal` takes it.

    Returns:
      The handler before, to set again.
    """
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, handler)
    return before
