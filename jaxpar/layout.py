"""Where does everything of a run lie, and how is its step compiled: decided once.

What `jaxpar.initialize` works out before anything is placed, and `Engine` asks for when
it places, restores and explains.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar import tree
from jaxpar.jaxprs import flops
from jaxpar.mesh import DATA, are_present, lowering_platform
from jaxpar.optim.update import Update
from jaxpar.pipeline.execution import Execution
from jaxpar.plan.budget import Budget, Measured, measure
from jaxpar.plan.expected import Meant, expected_budget, step_bytes
from jaxpar.plan.explain import Explanation, make_explanation, state_bytes
from jaxpar.plan.hlo import Module, parse
from jaxpar.plan.operations import todays_lines
from jaxpar.plan.plan import (
    BytesPerDevice,
    Plan,
    backend_notes,
    split_memory,
)
from jaxpar.plan.program import Program, read_program
from jaxpar.plan.roofline import Work, estimate
from jaxpar.plan.target import Target
from jaxpar.plan.work import link_bytes, memory_traffic
from jaxpar.precision import Precision
from jaxpar.sharding.zero import LeafPlan, ZeroStage
from jaxpar.state import (
    TrainState,
    keep_state,
    kept_structs,
    logical_state,
    state_shardings,
)
from jaxpar.xla_settings import Setting


@dataclasses.dataclass(frozen=True)
class Layout:
    """The state's shapes and places, and the settings of the step.

    Attributes:
      mesh: the mesh.
      abstract: the train state's shapes.
      plans: parameter name -> plan.
      stage: the row of the ZeRO table.
      coupled: whether the loss couples examples.
      settings: the compiler's options.
      execution: how the model meets the pipe axis.
      precision: what the step computes in.
      accumulate: micro-batches a step.
      forward_flops: operations of a step's forward passes, of all devices.
      update: the optimizer, and how it keeps the state.
      remarks: what an explanation says of the loss.
    """

    mesh: Mesh
    abstract: TrainState
    plans: dict[str, LeafPlan]
    stage: ZeroStage
    coupled: bool
    settings: tuple[Setting, ...]
    execution: Execution
    precision: Precision
    accumulate: int
    forward_flops: int
    update: Update
    remarks: tuple[str, ...]

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where the state's leaves are stored."""
        return state_shardings(self.abstract, self.plans, self.stage, self.mesh)

    @functools.cached_property
    def can_run(self) -> bool:
        """Whether the mesh's devices are here, and not only to compile for."""
        return are_present(self.mesh)

    @property
    def summary(self) -> str:
        """Parameters, ZeRO stage, mesh and dtype in a line."""
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        return (
            f"{tree.num_elements(self.abstract.params):,} parameters, "
            f"ZeRO {self.stage.number}, {sizes}, {self.precision.compute_dtype}, "
            f"accumulate {self.accumulate}"
        )

    def structs(self) -> TrainState:
        """The logical state's shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            self.abstract,
            self.shardings,
        )

    @functools.cached_property
    def kept(self) -> TrainState:
        """What lies on the devices from step to step: shapes, dtypes and shardings."""
        return kept_structs(self.update, self.abstract, self.shardings)

    @functools.cached_property
    def kept_shardings(self) -> TrainState:
        """Of `kept`."""
        return jax.tree.map(lambda x: x.sharding, self.kept)

    def keep(self, state: TrainState) -> TrainState:
        """Lay a logical state out as the optimizer keeps it."""
        return keep_state(self.update, state)

    def logical(self, kept: TrainState) -> TrainState:
        """Undo `keep`; shapes where the devices are not here."""
        if not self.can_run:
            return self.structs()
        return logical_state(self.update, kept)

    def initial_state(
        self, init: Callable[[jax.Array], TrainState], seed: int
    ) -> TrainState:
        """Initialise what is kept; `kept` itself where the devices are not here."""
        if not self.can_run:
            return self.kept

        def kept(key: jax.Array) -> TrainState:
            return self.keep(init(key))

        return jax.jit(kept, out_shardings=self.kept_shardings)(jax.random.key(seed))

    def require_devices(self, call: str) -> None:
        """Refuse what runs something on devices that are only to compile for.

        Raises:
          RuntimeError: if the mesh's devices are not here.
        """
        if not self.can_run:
            device = self.mesh.devices.flat[0]
            raise RuntimeError(
                f"{call}: this engine's mesh is of {self.mesh.size} "
                f"{device.device_kind} that are not here: it can explain() and "
                "lower() its step, not run it. Make the mesh of jax.devices() to run."
            )

    def explain(self, compiled: Any, module: Module | None = None) -> Explanation:
        """Explain the compiled step; `module` is its program, where that is parsed."""
        return make_explanation(
            self.kept,
            self.plans,
            self.stage,
            coupled=self.coupled,
            program=read_program(compiled, self.mesh, module),
            settings=self.settings,
            notes=self.execution.notes(self.stage, self.plans),
            remarks=(*self.update.notes(), *self.remarks),
        )

    def measure(self, lowered: jax.stages.Lowered) -> Measured:
        """Compile the step, and say what it holds and moves, and for which lines."""
        with todays_lines():
            compiled = lowered.compile()
        module = parse(text := compiled.as_text() or "", self.execution.taken)
        explanation = self.explain(compiled, module)
        return measure(explanation, module, text, on_cpu=self._platform == "cpu")

    def budget(self) -> Budget:
        """What the step holds and moves by design."""
        ruled = state_shardings(self.abstract, self.plans, self.stage, self.mesh)
        at_rest = state_bytes(kept_structs(self.update, self.abstract, ruled))
        crossing = self.execution.crossing(list(self.plans.values()))
        return expected_budget(crossing, self.meant, sum(at_rest.values()))

    @property
    def meant(self) -> Meant:
        """How parameters and gradients cross data by design."""
        return Meant(
            stage=self.stage,
            precision=self.precision,
            accumulate=self.accumulate,
            sizes=dict(self.mesh.shape),
            platform=self._platform,
            coupled=self.coupled,
        )

    def plan(
        self, traced: jax.stages.Traced, target: Target, tokens_per_step: int | None
    ) -> Plan:
        """Compile the step for its mesh's devices, those of a target, and plan it.

        Raises:
          ValueError: if the target has another number of devices.
        """
        if target.num_devices != self.mesh.size:
            raise ValueError(
                f"target={target.name!r} has {target.num_devices} devices, but the "
                f"mesh has {self.mesh.size}; make the mesh of the target's."
            )
        began = time.perf_counter()
        compiled = lower_for(traced, self.mesh).compile()
        compile_seconds = time.perf_counter() - began
        module = parse(text := compiled.as_text() or "", self.execution.taken)
        program = read_program(compiled, self.mesh, module)
        model_flops = 3 * self.forward_flops
        data, counted = self.mesh.shape[DATA], flops(traced.jaxpr.eqns)
        total = self.execution.flops(counted, model_flops, data)
        work = Work(
            flops=total / self.mesh.size,
            model_flops=model_flops / self.mesh.size,
            dtype=str(self.precision.compute_dtype),
            traffic=memory_traffic(module),
            collectives=program.collectives,
            bubble=self.execution.bubble,
            zero=self.stage.number,
        )
        hardware, sizes = target.hardware, dict(self.mesh.shape)
        return Plan(
            target=target.name,
            compiled_for=lowering_platform(self.mesh),
            num_devices=self.mesh.size,
            mesh=sizes,
            zero=self.stage.number,
            precision=work.dtype,
            num_params=tree.num_elements(self.abstract.params),
            memory=self._memory(program),
            device_memory_bytes=hardware.memory_bytes if hardware else None,
            program=program,
            links=hardware
            and link_bytes(program.collectives, sizes, target.devices_per_host),
            flops_per_step=total,
            model_flops_per_step=model_flops,
            tokens_per_step=tokens_per_step,
            compile_seconds=compile_seconds,
            estimate=estimate(work, target, sizes),
            schedule=self.execution.schedule,
            schedule_times=dict(self.execution.times),
            notes=(
                *backend_notes(target, text),
                *self.execution.notes(self.stage, self.plans),
                *self.update.notes(),
            ),
        )

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def _memory(self, program: Program) -> BytesPerDevice:
        """A program's memory by kind."""
        copies, gradients = step_bytes(self.plans.values(), self.meant)
        at_rest = state_bytes(self.kept)
        return split_memory(program, at_rest, copies=copies, gradients=gradients)


def lower_for(traced: jax.stages.Traced, mesh: Mesh) -> jax.stages.Lowered:
    """Lower a traced function for a mesh's devices, which need not be here."""
    return traced.lower(lowering_platforms=(lowering_platform(mesh),))
