"""How does a trace show what the loop of a run does: steps, and phases within them?

Annotations cost nothing while nobody traces; any profiler shows them.
"""

import contextlib

import jax

STEP = "train"
"""The name of a step's annotation; its number is ``step_num``."""

_IN_STEP = ("data", "step", "compile", "replay")


def name_of(phase: str) -> str:
    """The name of a phase's annotation."""
    return f"loop/{phase}"


class Annotations:
    """Annotates the steps and phases of a loop."""

    def __init__(self):
        self._step, self._phase = contextlib.ExitStack(), contextlib.ExitStack()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Enter a phase, of the step before or of a new one.

        Args:
          phase: one of `jaxpar.launch.heartbeat.PHASES`. A step begins with "data", and
            ends with the next one, or with what is not part of a step.
          step: the step's number; None for the one before.
        """
        self._phase.close()
        begins = phase == "data" and step is not None
        if begins or phase not in _IN_STEP:
            self._step.close()
        if begins:
            annotation = jax.profiler.StepTraceAnnotation(STEP, step_num=step)
            self._step.enter_context(annotation)
        annotation = jax.profiler.TraceAnnotation(name_of(phase))
        self._phase.enter_context(annotation)

    def close(self) -> None:
        """End the annotations; a trace has only those that ended in it."""
        self._phase.close()
        self._step.close()
