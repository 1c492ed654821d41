"""How do the threads of a process save and restore: one after the other.

Orbax writes one step at a time, and processes agree by collectives, which must be
called in one order everywhere. Threads of one process wait for each other. In a run of
several processes their order could differ from one to the next, so that one thread of
each makes all calls.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])

_turn, _choosing = threading.RLock(), threading.Lock()
_callers: list[threading.Thread] = []
"""The thread that makes the calls of a run of several processes; none before."""


def one_at_a_time(method: F) -> F:
    """Let a method run in one thread at a time, with all others of this decorator.

    Raises:
      RuntimeError: from the method, in a run of several processes, if another thread
        that still runs has made such a call.
    """

    @functools.wraps(method)
    def in_turn(*args: Any, **named: Any) -> Any:
        if jax.process_count() > 1:
            _require_caller(threading.current_thread())
        with _turn:
            return method(*args, **named)

    return in_turn  # pyright: ignore[reportReturnType] - the same signature


def _require_caller(thread: threading.Thread) -> None:
    with _choosing:
        if not _callers or not _callers[0].is_alive():
            _callers[:] = [thread]
        caller = _callers[0]
    if caller is not thread:
        raise RuntimeError(
            f"a checkpoint was asked for in thread {thread.name!r}, but thread "
            f"{caller.name!r} has saved or restored before, and the order of their "
            "calls may differ between processes: in a run of several processes, let "
            "one thread make all calls"
        )
