"""How much does a step hold and communicate, according to the compiled program?"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from jaxpar.compiled.budget import (
    Budget,
    BudgetExceeded,
    check,
    record,
)
from jaxpar.compiled.closed_form import ClosedForm, closed_form_budget
from jaxpar.compiled.explain import Explanation, make_explanation, state_bytes, total
from jaxpar.compiled.exposed_limit import check_exposed_ms
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.host_arguments import name_host_arguments
from jaxpar.compiled.measured import Measured, join_measured, measure
from jaxpar.compiled.program import CompiledProgram, join_programs, read_program
from jaxpar.compiled.source_lines import todays_lines
from jaxpar.compiled.xla_flags import Setting
from jaxpar.engine.placement import Placement
from jaxpar.mesh import lowering_platform
from jaxpar.pipeline.execution import Execution
from jaxpar.sharding.memory_kinds import has_memory_kinds
from jaxpar.sharding.zero import ZeroStage
from jaxpar.step.precision import Precision
from jaxpar.step.state import packed_structs, state_shardings


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What is known about a step before it is compiled.

    Attributes:
      execution: how the model runs over the pipe axis.
      zero: the row of the ZeRO table, as the step runs it.
      precision: the step's dtypes.
      accumulate: micro-batches a step.
      coupled: whether the loss couples examples.
      averages: whether a loss function averages over a micro-batch's shards.
      settings: the compiler's options.
      shares: trained parameter -> the share of its gradient that a step reduces, on
        average: 0 where the loss has none, less than 1 where it leaves layers out.
      forward_flops: FLOPs of a step's forward passes, on all devices.
      precision_notes: lines about what does not compute in the step's precision.
      remarks: lines about the loss for `CompiledStep.explain`.
      changes_with: setting, such as "accumulate" -> why another value of it would give
        other numbers, beyond rounding.
    """

    execution: Execution
    zero: ZeroStage
    precision: Precision
    accumulate: int
    coupled: bool
    averages: bool
    settings: tuple[Setting, ...]
    shares: Mapping[str, float]
    forward_flops: int
    precision_notes: tuple[str, ...]
    remarks: tuple[str, ...]
    changes_with: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def model_flops(self) -> int:
        """FLOPs of a step's forward and backward passes, without recomputation.

        The backward pass counts as two forward passes: gradients of activations, and of
        weights. Where parameters are frozen there are fewer of the latter, and an MFU
        computed from these FLOPs is too high.
        """
        return 3 * self.forward_flops

    @property
    def sees_others(self) -> bool:
        """Whether the loss of a row depends on other rows of its micro-batch."""
        return self.coupled or self.averages


class CompiledStep(abc.ABC):
    """A step that can be compiled to inspect it.

    Args:
      placement: where every leaf of the state is stored.
      spec: what is known about the step.
      arguments: the arguments of `jaxpar.initialize`, the batch as shapes.
      seen: where the leaves are stored that the step's loss sees; None for all.

    Attributes:
      placement: as given.
      seen: as given.
      name: of the step's loss, if there are several.
      spec: as given.
      arguments: as given, to rebuild the engine on another mesh.
    """

    def __init__(
        self,
        placement: Placement,
        spec: StepSpec,
        arguments: Mapping[str, Any],
        *,
        seen: Placement | None = None,
    ):
        self.placement, self.spec, self.arguments = placement, spec, arguments
        self.seen = seen or placement
        self.name: str | None = None

    @abc.abstractmethod
    def traces(self) -> Mapping[str, jax.stages.Traced]:
        """Trace the step's jitted functions, by name, in the order they run.

        One, named "step", unless the optimizer works on the host between two. The first
        is a function of the packed state's leaves and a batch.
        """

    if not TYPE_CHECKING:  # Otherwise type checkers accept any attribute.

        def __getattr__(self, name: str) -> NoReturn:
            """Raise for an unknown attribute; for `plan`, name its replacement."""
            moved = " Call jaxpar.plan(engine, target)." if name == "plan" else ""
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}.{moved}",
                name=name,
                obj=self,
            )

    def lower(self, part: str | None = None) -> jax.stages.Lowered:
        """Lower the step for the mesh's devices, which may be compile-only.

        Args:
          part: which of a step's several programs, "gradients" or "update"; None where
            there is one.

        Returns:
          The lowered step; ``.compile()`` makes the program. Its arguments are named
          ``state[0]``, ``state[1]`` and so on, and ``batch...``.

        Raises:
          ValueError: if there is no such program, or several and none is named.
        """
        lowered = self.lowered()
        if part is None and len(lowered) == 1:
            return next(iter(lowered.values()))
        if part not in lowered:
            raise ValueError(
                f"lower: part={part!r} must be one of this step's programs: "
                f"{', '.join(map(repr, lowered))}."
            )
        return lowered[part]

    def lowered(
        self, traces: Mapping[str, jax.stages.Traced] | None = None
    ) -> dict[str, jax.stages.Lowered]:
        """Lower all programs of the step, by name, in the order they run.

        Args:
          traces: as `traces` returns them; None to trace.
        """
        platforms = (lowering_platform(self.placement.mesh),)
        found = {
            name: traced.lower(lowering_platforms=platforms)
            for name, traced in (traces or self.traces()).items()
        }
        if on_host := self.placement.on_host:
            for each in found.values():
                name_host_arguments(each, on_host)
            if grads := self.placement.host_grads:
                after = len(jax.tree.leaves(self.placement.packed))
                name_host_arguments(found["update"], [after + n for n in grads])
        return found

    def explain(self) -> Explanation:
        """Compile the step, and report what a device stores, sends and needs.

        Returns:
          A few lines when printed, also in a notebook; ``details`` has a row for each
          leaf and each collective, `as_json` is for programs.
        """
        compiled = {name: each.compile() for name, each in self.lowered().items()}
        fraction, mesh = self.spec.execution.active_fraction, self.placement.mesh
        modules = {n: parse(x.as_text() or "", fraction) for n, x in compiled.items()}
        return self._explanation(
            {n: read_program(x, mesh, modules[n]) for n, x in compiled.items()}
        )

    def budget(self) -> Budget:
        """Compile the step, and record what it holds and communicates.

        Returns:
          A budget to store in a file (`Budget.as_json`) and to `verify` against.
        """
        return record(self.measure(self.lowered()))

    def verify(
        self, budget: Budget | None = None, *, exposed_ms: float | None = None
    ) -> Budget:
        """Compile the step, and compare it with a budget.

        Compares state bytes, bytes communicated over each axis by kind of collective,
        and peak memory. A loop of unknown trip count is counted once. A step that
        reduces its gradients less than once fails too (`Budget.at_least`).

        Args:
          budget: the most that the step may hold and communicate, such as `budget`
            recorded; None for the closed form of its ZeRO stage, precision and
            micro-batches. The closed form bounds the state and the traffic over data,
            not over tensor and pipe, and not an optimizer's own traffic (Muon).
          exposed_ms: milliseconds a step that kernels may wait for collectives, by the
            compiled schedule at assumed rates; None for the budget's own limit. Needs a
            mesh of GPUs, present or absent.

        Returns:
          What the step holds and communicates now, as `budget` returns it.

        Raises:
          BudgetExceeded: if the step does not keep to it; the message names the leaves,
            or the operations by their source lines.
          ValueError: if exposed_ms is negative, or the mesh is not of GPUs whose rates
            are known.
        """
        budget = budget or self.closed_form_budget()
        if exposed_ms is not None:
            budget = dataclasses.replace(budget, exposed_ms=exposed_ms)
        check_exposed_ms(budget.exposed_ms, self.placement.mesh)
        measured = self.measure(self.lowered())
        violations = check(budget, measured)
        if violations:
            raise BudgetExceeded(violations)
        return record(measured)

    def closed_form_budget(self) -> Budget:
        """What the step should hold and communicate, by the closed form."""
        own, spec = self.placement, self.spec
        ruled = own.abstract, own.leaves, own.zero, own.mesh, own.update
        shardings = state_shardings(*ruled, own.carried)
        stored = state_bytes(packed_structs(own.update, own.abstract, shardings))
        communicated = spec.execution.communicated_shardings(self.seen.trained)
        on_device, on_host = total(stored)
        # Where shardings have no memory kinds, the program says what is on the host.
        on_host = on_host if has_memory_kinds(own.mesh) else on_device
        given = communicated, self.closed_form, on_device, on_host
        frozen = self.seen.frozen
        others, dtypes = [leaf for leaf, _ in frozen], [dtype for _, dtype in frozen]
        moved = spec.execution.communicated_shardings(others)
        named = list(zip(moved, dtypes, strict=True))
        again = [(leaf, jnp.dtype(jnp.float32)) for leaf in communicated]
        named += again * (spec.execution.versions - 1)
        reduction = self.seen.update.reduction
        return closed_form_budget(*given, named, reduction, spec.shares)

    def measure(self, lowered: Mapping[str, jax.stages.Lowered]) -> Measured:
        """Compile the step, and measure what it holds and moves, by source line.

        Args:
          lowered: its programs, such as `lowered` returns them.
        """
        with todays_lines():
            compiled = {name: each.compile() for name, each in lowered.items()}
        texts = {name: each.as_text() or "" for name, each in compiled.items()}
        fraction, mesh = self.spec.execution.active_fraction, self.placement.mesh
        modules = {name: parse(text, fraction) for name, text in texts.items()}
        programs = {
            name: read_program(compiled[name], mesh, modules[name]) for name in texts
        }
        explanation = self._explanation(programs)
        on_cpu = self.closed_form.platform == "cpu"
        return join_measured(
            measure(
                explanation,
                modules[name],
                text,
                on_cpu=on_cpu,
                communication=programs[name].communication,
            )
            for name, text in texts.items()
        )

    @property
    def closed_form(self) -> ClosedForm:
        """The closed form of the traffic over data of parameters and gradients."""
        mesh = self.placement.mesh
        return ClosedForm(
            zero=self.spec.zero,
            precision=self.spec.precision,
            accumulate=self.spec.accumulate,
            sizes=dict(mesh.shape),
            platform=mesh.devices.flat[0].platform,
            coupled=self.spec.coupled,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the schedule, the optimizer and the precision, a line each."""
        return (*self._of_execution, *self._of_update, *self.spec.precision_notes)

    @property
    def _of_execution(self) -> tuple[str, ...]:
        own, frozen = self.placement, [leaf.name for leaf, _ in self.seen.frozen]
        return self.spec.execution.notes(own.zero, own.leaves, frozen)

    @property
    def _of_update(self) -> tuple[str, ...]:
        update = self.placement.update
        return (*update.notes(), *update.reduction.notes())

    def _explanation(self, programs: Mapping[str, CompiledProgram]) -> Explanation:
        """Explain the compiled step."""
        own, spec = self.placement, self.spec
        return make_explanation(
            own.packed,
            own.leaves,
            own.zero,
            coupled=spec.coupled,
            program=join_programs(programs),
            settings=spec.settings,
            notes=self._of_execution,
            remarks=(*self._of_update, *spec.precision_notes, *spec.remarks),
        )
