"""How long will the step compile? It is said while the first step waits for it."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxpar.engine.host_programs import StepProgram
from jaxpar.engine.same_program import check_same_program
from jaxpar.progress import waiting
from jaxpar.types import Batch

_OF_LOWERING = {"cpu": 16.0}
"""Platform -> how much longer than lowering a step compiling it takes.

Of 14 steps on XLA:CPU (GPTs, unscanned transformers, MLPs, pipelines), 7 to 31, the
median 16: the estimate is within a factor of two for 13 of them. Where a platform is
not listed no time is said.
"""


@contextlib.contextmanager
def compiling(
    program: StepProgram, leaves: list[Any], batch: Batch, *, platform: str
) -> Iterator[None]:
    """Say that the step is traced, and then that it compiles; on the first process.

    Args:
      program: the step, whose first call is made inside. It finds what is traced and
        lowered here.
      leaves: as it takes them.
      batch: as it takes it.
      platform: the mesh's.

    Raises:
      ValueError: as `check_same_program`.
    """
    shown = jax.process_index() == 0
    with waiting("tracing the step", shown=shown):
        traces = program.traces(leaves, batch)
        began = time.perf_counter()
        lowered = {name: traced.lower() for name, traced in traces.items()}
        seconds = time.perf_counter() - began
        check_same_program(lowered)
    expected = about(seconds, platform)
    with waiting("compiling the step", expected=expected, shown=shown):
        yield


def about(lowering: float, platform: str) -> str:
    """How many seconds a step compiles, in words; empty if unknown.

    Args:
      lowering: the seconds that lowering it has taken, on this machine and under the
        same load.
      platform: of the devices that it is compiled for.

    Example:
      >>> about(2.5, "cpu"), about(2.5, "tpu")
      ('about 40 s unless it is cached', '')
    """
    factor = _OF_LOWERING.get(platform)
    if factor is None:
        return ""
    return f"about {max(factor * lowering, 1):.0f} s unless it is cached"
