"""How many programs does the host dispatch before it waits for the devices?

Dispatch returns before a program has run. Without a bound, a loop that never reads a
number queues every batch on the devices, learns late which step failed, and deadlocks
on CPUs: XLA:CPU runs about 32 programs at once, and their collectives wait for programs
that are not started.
"""

import collections
import contextlib
import dataclasses
import warnings
from collections.abc import Mapping

import jax

from jaxpar.step.loss_scale import require_scale

AHEAD = 2
"""Programs in flight. XLA:CPU (jax 0.11.2) works with 2 to 31 on eight devices, and
with 2 and 8 on 32. Two are enough for a GPU: one runs, one waits."""


class SkippedStepWarning(UserWarning):
    """A step changed nothing, because its numbers were not finite."""


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A program that may still run.

    Attributes:
      name: such as "step 7", for its error message.
      output: an array that is ready when the program has run; never donated.
      skipped: for a step, the skipped steps after it, of its loss.
      loss: the loss's name, if there are several.
      exhausted: for a step with loss scaling, whether gradients overflowed at the
        minimal scale. Other overflows are normal, so skipped steps are not reported.
    """

    name: str
    output: jax.Array
    skipped: jax.Array | None = None
    exhausted: jax.Array | None = None
    loss: str | None = None


class RunAhead:
    """Bounds the programs in flight, and checks what they report.

    Args:
      skipped: loss -> its steps skipped before the first program.
      bound: the most programs in flight.
    """

    def __init__(
        self, skipped: Mapping[str | None, int] | None = None, bound: int = AHEAD
    ):
        self._waiting: collections.deque[Dispatched] = collections.deque()
        self._bound = bound
        self._before = dict(skipped or {})
        self._skipped = dict(self._before)

    def add(self, dispatched: Dispatched) -> None:
        """Add a program; wait for the oldest while there are more than the bound.

        Raises:
          FloatingPointError: if a finished step overflowed at the minimal scale.
        """
        self._waiting.append(dispatched)
        self._settle(self._bound)

    def finish(self) -> None:
        """Wait for all of them."""
        self._settle(0)

    def drop(self) -> None:
        """Wait for all of them, whatever they report."""
        for dispatched in self._waiting:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.block_until_ready(dispatched.output)
        self._waiting.clear()

    def finish_before_others(self) -> None:
        """Wait for all of them before a program that communicates across processes.

        Gloo confuses the collectives of two programs that run at once.
        """
        if jax.process_count() > 1:
            self.finish()

    def _settle(self, bound: int) -> None:
        while len(self._waiting) > bound:
            oldest = self._waiting.popleft()
            try:
                jax.block_until_ready(oldest.output)
            except jax.errors.JaxRuntimeError as error:
                error.add_note(
                    f"Raised by {oldest.name}, which was dispatched earlier."
                )
                raise
            if oldest.exhausted is not None:
                self._require_scale(oldest.exhausted)
            elif oldest.skipped is not None:
                self._report_skipped(oldest, int(oldest.skipped))

    def _require_scale(self, exhausted: jax.Array) -> None:
        """Raise once; programs dispatched later would report the same."""
        try:
            require_scale(exhausted)
        except FloatingPointError:
            self._waiting.clear()
            raise

    def _report_skipped(self, step: Dispatched, skipped: int) -> None:
        """Warn at the first skipped step, and whenever their number is a power of 2."""
        loss = step.loss
        count = skipped - self._before.get(loss, 0)
        is_new = skipped > self._skipped.get(loss, 0)
        self._skipped[loss] = skipped
        if is_new and count & (count - 1) == 0:
            warnings.warn(
                f"{step.name} was skipped ({count} so far): its gradients were not "
                "finite, or its loss had no weight. Parameters are unchanged. Look for "
                "NaN or infinity in the batch, or lower the learning rate.",
                SkippedStepWarning,
                stacklevel=5,
            )
