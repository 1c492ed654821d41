"""How much does a step hold and communicate, according to the compiled program?"""

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
    """What is known about a step before it is compiled.

    Attributes:
      execution: how the model runs over the pipe axis.
      precision: the step's dtypes.
      accumulate: micro-batches a step.
      coupled: whether the loss couples examples.
      settings: the compiler's options.
      forward_flops: FLOPs of a step's forward passes, on all devices.
      remarks: lines about the loss for `CompiledStep.explain`.
    """

    execution: Execution
    precision: Precision
    accumulate: int
    coupled: bool
    settings: tuple[Setting, ...]
    forward_flops: int
    remarks: tuple[str, ...]


class CompiledStep(abc.ABC):
    """A step that can be compiled to inspect it.

    Args:
      placement: where every leaf of the state is stored.
      spec: what is known about the step.
      arguments: the arguments of `jaxpar.initialize`, the batch as shapes.

    Attributes:
      placement: as given.
      spec: as given.
      arguments: as given, to rebuild the engine on another mesh.
    """

    def __init__(
        self, placement: Placement, spec: StepSpec, arguments: Mapping[str, Any]
    ):
        self.placement, self.spec, self.arguments = placement, spec, arguments

    @abc.abstractmethod
    def trace(self) -> jax.stages.Traced:
        """Trace the step: a function of the packed state's leaves and a batch."""

    if not TYPE_CHECKING:  # Otherwise type checkers accept any attribute.

        def __getattr__(self, name: str) -> NoReturn:
            """Raise for an unknown attribute; for `plan`, name its replacement."""
            moved = " Call jaxpar.plan(engine, target)." if name == "plan" else ""
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}.{moved}",
                name=name,
                obj=self,
            )

    def lower(self) -> jax.stages.Lowered:
        """Lower the step for the mesh's devices, which may be compile-only.

        Returns:
          The lowered step; ``.compile()`` makes the program. Its arguments are named
          ``state[0]``, ``state[1]`` and so on, and ``batch...``.
        """
        platform = lowering_platform(self.placement.mesh)
        return self.trace().lower(lowering_platforms=(platform,))

    def explain(self) -> Explanation:
        """Compile the step, and report bytes by leaf, traffic by axis, and memory.

        Returns:
          Text when printed, also in a notebook; `as_json` for programs.
        """
        return self._explanation(self.lower().compile())

    def budget(self) -> Budget:
        """Compile the step, and record what it holds and communicates.

        Returns:
          A budget to store in a file (`Budget.as_json`) and to `verify` against.
        """
        return self.measure(self.lower()).budget()

    def verify(self, budget: Budget | None = None) -> Budget:
        """Compile the step, and compare it with a budget.

        Compares state bytes, bytes communicated over each axis by kind of collective,
        and peak memory. A loop of unknown trip count is counted once.

        Args:
          budget: the most that the step may hold and communicate, such as `budget`
            recorded; None for the closed form of its ZeRO stage, precision and
            micro-batches. The closed form bounds the state and the traffic over data,
            not over tensor and pipe, and not an optimizer's own traffic (Muon).

        Returns:
          What the step holds and communicates now, as `budget` returns it.

        Raises:
          BudgetExceeded: if the step exceeds it; the message names the leaves, or the
            operations by their source lines.
        """
        measured = self.measure(self.lower())
        violations = check(budget or self.closed_form_budget(), measured)
        if violations:
            raise BudgetExceeded(violations)
        return measured.budget()

    def closed_form_budget(self) -> Budget:
        """What the step should hold and communicate, by the closed form."""
        own, spec = self.placement, self.spec
        ruled = state_shardings(own.abstract, own.leaves, own.zero, own.mesh)
        stored = state_bytes(packed_structs(own.update, own.abstract, ruled))
        communicated = spec.execution.communicated_shardings(list(own.leaves.values()))
        return closed_form_budget(communicated, self.closed_form, sum(stored.values()))

    def measure(self, lowered: jax.stages.Lowered) -> Measured:
        """Compile the step, and measure what it holds and moves, by source line."""
        with todays_lines():
            compiled = lowered.compile()
        text = compiled.as_text() or ""
        module = parse(text, self.spec.execution.active_fraction)
        explanation = self._explanation(compiled, module)
        on_cpu = self.closed_form.platform == "cpu"
        return measure(explanation, module, text, on_cpu=on_cpu)

    @property
    def closed_form(self) -> ClosedForm:
        """The closed form of the traffic over data of parameters and gradients."""
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
        """Notes on the schedule and the optimizer, a line each."""
        own, execution = self.placement, self.spec.execution
        return (*execution.notes(own.zero, own.leaves), *own.update.notes())

    def _explanation(self, compiled: Any, module: Module | None = None) -> Explanation:
        """Explain the compiled step; `module` is its program, if already parsed."""
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
