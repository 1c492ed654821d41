"""What is said of the exposed communication of steps compiled for absent H200s."""

import dataclasses
import re
import types

import jaxpar
from jaxpar.compiled.program import CompiledProgram
from jaxpar.tree import num_elements
from tests.compiled.programs import Run, arguments_of


@dataclasses.dataclass(frozen=True)
class ExposedStep:
    """A step, compiled once, and what is said of it.

    Attributes:
      psi: parameters.
      program: the compiled step, read.
      starts: opcode -> instructions of the program that start a collective.
      shown: what explain prints.
      details: its details.
      violations: what verify says where nothing may be exposed.
    """

    psi: int
    program: CompiledProgram
    starts: dict[str, int]
    shown: str
    details: str
    violations: tuple[str, ...]


def expose(run: Run) -> ExposedStep:
    """Explain the step, and verify it against a budget of 0 ms exposed."""
    engine = jaxpar.initialize(**arguments_of(run))
    compiled = engine.lower().compile()
    once = types.SimpleNamespace(compile=lambda: compiled)
    engine.lowered = lambda: {"step": once}
    explained = engine.explain()
    starts = re.findall(r" (all-\w+|reduce-scatter)-start\(", compiled.as_text())
    try:
        engine.verify(exposed_ms=0.0)
    except jaxpar.BudgetExceeded as error:
        violations = error.violations
    else:
        violations = ()
    return ExposedStep(
        psi=num_elements(engine.state.params),
        program=explained.program,
        starts={kind: starts.count(kind) for kind in set(starts)},
        shown=str(explained),
        details=explained.details,
        violations=violations,
    )
