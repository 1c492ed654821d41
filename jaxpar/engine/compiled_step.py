"""What does an engine's step hold and communicate, read from the compiled program?"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jaxpar.compiled.budget import Budget, BudgetExceeded, Measured, check, measure
from jaxpar.compiled.closed_form import ClosedForm, closed_form_budget
from jaxpar.compiled.explain import Explanation, make_explanation, state_bytes
from jaxpar.compiled.hlo import Module, parse
from jaxpar.compiled.program import read_program
from jaxpar.compiled.source_lines import todays_lines
from jaxpar.compiled.xla_flags import Setting
from jaxpar.engine.placement import Placement
from jaxpar.mesh import lowering_platform
from jaxpar.pipeline.execution import Execution
from jaxpar.step.precision import Precision
from jaxpar.step.state import packed_structs, state_shardings


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What is known of a step before it is compiled.

    Attributes:
      execution: how the model meets the pipe axis.
      precision: what the step computes in.
      accumulate: micro-batches a step.
      coupled: whether the loss couples examples.
      settings: the compiler's options.
      forward_flops: operations of a step's forward passes, of all devices.
      remarks: what an explanation says of the loss.
    """

    execution: Execution
    precision: Precision
    accumulate: int
    coupled: bool
    settings: tuple[Setting, ...]
    forward_flops: int
    remarks: tuple[str, ...]


class CompiledStep(abc.ABC):
    """A step that is compiled whenever something is asked about it.

    Args:
      placement: where every leaf of the state is stored.
      spec: what is known of the step.
      arguments: what `jaxpar.initialize` was given, the batch as shapes.

    Attributes:
      placement: as given.
      spec: as given.
      arguments: as given: to make the engine again on another mesh.
    """

    def __init__(
        self, placement: Placement, spec: StepSpec, arguments: Mapping[str, Any]
    ):
        self.placement, self.spec, self.arguments = placement, spec, arguments

    @abc.abstractmethod
    def trace(self) -> jax.stages.Traced:
        """Trace the step: a function of the kept state's leaves and a batch."""

    if not TYPE_CHECKING:  # Else checkers take any name for an attribute.

        def __getattr__(self, name: str) -> NoReturn:
            """Say of a name that there is not where it has gone."""
            moved = " Call jaxpar.plan(engine, target)." if name == "plan" else ""
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}.{moved}",
                name=name,
                obj=self,
            )

    def lower(self) -> jax.stages.Lowered:
        """Lower the step for the mesh's devices, which need not be here.

        Returns:
          What ``.compile()`` makes the program from. Its arguments are named
          ``state[0]``, ``state[1]`` and so on, and ``batch...``.
        """
        platform = lowering_platform(self.placement.mesh)
        return self.trace().lower(lowering_platforms=(platform,))

    def explain(self) -> Explanation:
        """Compile the step, and say what every leaf, axis and the memory cost.

        Returns:
          Text when printed, also in a notebook; `as_json` for programs.
        """
        return self._explanation(self.lower().compile())

    def budget(self) -> Budget:
        """Compile the step, and record what it holds and moves now.

        Returns:
          A budget to keep in a file (`Budget.as_json`) and to `verify` against.
        """
        return self.measure(self.lower()).budget()

    def verify(self, budget: Budget | None = None) -> Budget:
        """Compile the step, and hold it to a budget.

        State bytes, bytes that are communicated over each axis by kind of collective,
        and the peak. A loop whose trip count the program does not tell is counted once.

        Args:
          budget: what the step may hold and move, such as `budget` recorded; None for
            what its ZeRO stage, precision and micro-batches mean by design. That
            bounds the state and what is communicated over data, not over tensor and
            pipe, and not what an optimizer moves for itself (Muon).

        Returns:
          What the step holds and moves now, as `budget` does.

        Raises:
          BudgetExceeded: if it is more; the message names the leaves, or the
            operations by their lines in the source.
        """
        measured = self.measure(self.lower())
        violations = check(budget or self.closed_form_budget(), measured)
        if violations:
            raise BudgetExceeded(violations)
        return measured.budget()

    def closed_form_budget(self) -> Budget:
        """What the step holds and moves by design, by its closed form."""
        own, spec = self.placement, self.spec
        ruled = state_shardings(own.abstract, own.leaves, own.zero, own.mesh)
        stored = state_bytes(packed_structs(own.update, own.abstract, ruled))
        crossing = spec.execution.crossing(list(own.leaves.values()))
        return closed_form_budget(crossing, self.closed_form, sum(stored.values()))

    def measure(self, lowered: jax.stages.Lowered) -> Measured:
        """Compile the step, and say what it holds and moves, and for which lines."""
        with todays_lines():
            compiled = lowered.compile()
        text = compiled.as_text() or ""
        module = parse(text, self.spec.execution.active_fraction)
        explanation = self._explanation(compiled, module)
        on_cpu = self.closed_form.platform == "cpu"
        return measure(explanation, module, text, on_cpu=on_cpu)

    @property
    def closed_form(self) -> ClosedForm:
        """How parameters and gradients are communicated over data by design."""
        mesh = self.placement.mesh
        return ClosedForm(
            zero=self.placement.zero,
            precision=self.spec.precision,
            accumulate=self.spec.accumulate,
            sizes=dict(mesh.shape),
            platform=mesh.devices.flat[0].platform,
            coupled=self.spec.coupled,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing of the schedule and of the optimizer, a line each."""
        own, execution = self.placement, self.spec.execution
        return (*execution.notes(own.zero, own.leaves), *own.update.notes())

    def _explanation(self, compiled: Any, module: Module | None = None) -> Explanation:
        """Explain the compiled step; `module` is its program, where that is parsed."""
        own, spec = self.placement, self.spec
        return make_explanation(
            own.packed,
            own.leaves,
            own.zero,
            coupled=spec.coupled,
            program=read_program(compiled, own.mesh, module),
            settings=spec.settings,
            notes=spec.execution.notes(own.zero, own.leaves),
            remarks=(*own.update.notes(), *spec.remarks),
        )
