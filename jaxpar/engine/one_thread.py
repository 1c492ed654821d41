"""Who may call an object that donates its arrays: one thread at a time."""

import contextlib
import threading
from collections.abc import Iterator


class OneThread:
    """Raises for a second thread, instead of letting it wait as a lock does.

    Args:
      owner: the object's name in the error.
    """

    def __init__(self, owner: str):
        self._owner, self._lock = owner, threading.RLock()

    @contextlib.contextmanager
    def calling(self, method: str) -> Iterator[None]:
        """Hold the object for a call; the same thread may nest calls.

        Raises:
          RuntimeError: if another thread is in a call.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{self._owner}.{method}: another thread is in a method of this "
                f"{self._owner}. Call it from one thread, or hold a lock around the "
                "calls."
            )
        try:
            yield
        finally:
            self._lock.release()
