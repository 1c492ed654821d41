"""How do the processes of a run learn of a save that has failed in one of them?

Through JAX's coordination service, within a second and without a collective. So that
all act on it at the same step, they agree on one: each sends the last step that it has
asked at, and waits with the next question until all have; the one after the highest is
ahead of all.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpar.launch.agreement import service

_POLL_SECONDS = 0.2
_PREFIX = "jaxpar/save"


class FailedElsewhereError(RuntimeError):
    """Another process could not write its part of a save."""


class SaveOutcome:
    """What is known of a save in progress, in all processes.

    Args:
      number: of the save, the same in all processes.
      step: that is saved.
      client: of the coordination service; None for JAX's own, if there is one.
      place: (number of this process, number of processes); None for JAX's.

    Attributes:
      index: number of this process.
      count: number of processes.
    """

    def __init__(
        self,
        number: int,
        step: int,
        client: Any = None,
        place: tuple[int, int] | None = None,
    ):
        self.index, self.count = place or (jax.process_index(), jax.process_count())
        self._client: Any = client or service()
        self._key, self._step = f"{_PREFIX}/{number}", step
        self._why: str | None = None
        self._agreed: int | None = None
        self._is_over, self._asking = threading.Event(), threading.Lock()
        if self.count > 1:
            assert self._client is not None, "JAX has several processes"
            if self.index == 0 and number:
                self._client.key_value_delete(f"{_PREFIX}/{number - 1}/")
            threading.Thread(target=self._watch, name="save", daemon=True).start()

    def fail(self, why: str) -> None:
        """Report that this process's part has failed."""
        self._why = why
        if self.count > 1:
            text, key = f"process {self.index}: {why}", f"{self._key}/failed"
            # JAX itself ends a process that has lost the service.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(key, text, allow_overwrite=True)

    def require_sound(self) -> None:
        """Check that no process has failed so far.

        Raises:
          FailedElsewhereError: if another one has.
        """
        why = self._read("failed") if self.count > 1 else None
        if why is not None:
            raise FailedElsewhereError(why)

    def wait_for_all(self, name: str, seconds: float) -> None:
        """Return once all processes have called this.

        Args:
          name: of the place in the program.
          seconds: to wait at most.

        Raises:
          FailedElsewhereError: if another one has failed.
          TimeoutError: if the time is over.
        """
        if self.count == 1:
            return
        self._client.key_value_increment(f"{self._key}/{name}", 1)

        def are_all_there() -> bool | None:
            return int(self._read(name) or 0) >= self.count or None

        self._wait_for(are_all_there, f"{name}: not all processes", seconds)

    def scatter(self, name: str, values: Sequence[Any] | None, seconds: float) -> Any:
        """Send each process a JSON value of process 0's; every process calls it.

        Args:
          name: of the values, another one for each call.
          values: on process 0 the values of all processes, in their order.
          seconds: to wait at most.

        Returns:
          This process's value.

        Raises:
          FailedElsewhereError, TimeoutError: as `wait_for_all` does.
        """
        if self.index:
            return self._sent(f"{name}/{self.index}", seconds)
        assert values is not None, "process 0 has them"
        for index, value in enumerate(values[1:], 1):
            self._send(f"{name}/{index}", value)
        return values[0]

    def gather(self, name: str, value: Any, seconds: float) -> list[Any]:
        """Send process 0 a JSON value of each process; every process calls it.

        Args:
          name: of the values, another one for each call.
          value: this process's.
          seconds: that process 0 waits for each at most.

        Returns:
          On process 0 the values of all processes, in their order; else none.

        Raises:
          FailedElsewhereError, TimeoutError: as `wait_for_all` does.
        """
        if self.index:
            self._send(f"{name}/{self.index}", value)
            return []
        others = range(1, self.count)
        return [value, *(self._sent(f"{name}/{index}", seconds) for index in others)]

    def has_failed(self, step: int) -> bool:
        """Whether to save again after a step, in all processes at the same one.

        Args:
          step: the last one taken; every process asks after each.
        """
        if self.count == 1:
            return self._why is not None
        with self._asking:
            self._step = step
            return self._agreed is not None and step >= self._agreed

    def close(self) -> None:
        """Ask no more: all processes know how it has ended."""
        self._is_over.set()

    def _watch(self) -> None:
        if self._poll(lambda: self._read("failed")) is None:
            return
        with self._asking:
            self._client.key_value_set(f"{self._key}/at/{self.index}", str(self._step))
            steps = self._poll(self._steps)
            if steps is not None:
                self._agreed = 1 + max(steps)

    def _steps(self) -> list[int] | None:
        found = self._client.key_value_dir_get(f"{self._key}/at/")
        return [int(x) for _, x in found] if len(found) == self.count else None

    def _poll(self, read: Callable[[], Any]) -> Any:
        """What a function returns once it is not None; None if all is over before."""
        while not self._is_over.wait(_POLL_SECONDS):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                found = read()
                if found is not None:
                    return found
        return None

    def _send(self, name: str, value: Any) -> None:
        self._client.key_value_set(f"{self._key}/{name}", json.dumps(value))

    def _sent(self, name: str, seconds: float) -> Any:
        text = self._wait_for(lambda: self._read(name), f"{name}: not sent", seconds)
        return json.loads(text)

    def _wait_for(self, read: Callable[[], Any], missing: str, seconds: float) -> Any:
        """What a function returns once it is not None, while no process has failed."""
        until = time.monotonic() + seconds
        while (found := read()) is None:
            self.require_sound()
            if time.monotonic() > until:
                raise TimeoutError(f"{missing} within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return found

    def _read(self, name: str) -> str | None:
        try:
            return self._client.key_value_try_get(f"{self._key}/{name}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
