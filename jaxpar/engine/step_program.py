"""What steps: one jitted function, or several with work between them?

An update that is traced makes one, in which the state is donated. A `HostUpdate` works
on the host between two (`jaxpar.engine.host_programs`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiled.xla_flags import compiler_options
from jaxpar.engine.batches import BatchSpec
from jaxpar.engine.compiled_step import StepSpec
from jaxpar.engine.focus import Focus, focused
from jaxpar.engine.host_programs import (
    DelayedHost,
    HostBetween,
    Stepped,
    StepProgram,
    without_state,
)
from jaxpar.engine.placement import Placement
from jaxpar.mesh import on_abstract_mesh
from jaxpar.pipeline.execution import Execution
from jaxpar.pipeline.in_flight import PART as IN_FLIGHT
from jaxpar.sharding.memory_kinds import to_host
from jaxpar.step.reduction_part import PART
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import Reduced, TrainStep
from jaxpar.step.update import HostUpdate
from jaxpar.types import Batch


@dataclasses.dataclass(frozen=True)
class OneJit(StepProgram):
    """A step that is one jitted function.

    Attributes:
      step: ``(leaves, batch) -> Stepped``.
    """

    step: jax.stages.Wrapped

    def __call__(self, leaves: list[jax.Array], batch: Batch) -> Any:
        """See `StepProgram`."""
        return self.step(leaves, batch)

    def traces(self, leaves: list[Any], batch: Batch) -> dict[str, jax.stages.Traced]:
        """See `StepProgram`."""
        return {"step": self.step.trace(leaves, batch)}


@dataclasses.dataclass(frozen=True)
class UnderWay(OneJit):
    """A step of an asynchronous schedule, which leaves batches under way.

    Attributes:
      structure: of the state.
      execution: its `Execution.delay` and `Execution.synchronous_steps`.
      empty_batch: makes a batch's arrays, of any values.
    """

    structure: Any
    execution: Execution
    empty_batch: jax.stages.Wrapped

    def __call__(self, leaves: list[jax.Array], batch: Batch) -> Any:
        """See `StepProgram`; waits in a step that ends before the next one begins."""
        first = self.execution.synchronous_steps
        is_early = first and int(self._state(leaves).step) < first
        found = self.step(leaves, batch)
        return self._drained(found[0]) if is_early else found

    def settled(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """See `StepProgram`."""
        there = self._state(leaves).carried[IN_FLIGHT].is_there
        if not there.addressable_data(0).any():
            return leaves
        return self._drained(leaves)[0]

    def _drained(self, leaves: list[jax.Array]) -> Stepped:
        """End what is under way, in steps without a batch that are not counted."""
        number = jnp.copy(self._state(leaves).step)
        found: Any = None
        for _ in range(self.execution.delay):
            found = self.step(self._without_batch(leaves), self.empty_batch())
            leaves = found[0]
        state = dataclasses.replace(self._state(leaves), step=number)
        return jax.tree.leaves(state), *found[1:]

    def _without_batch(self, leaves: list[jax.Array]) -> list[jax.Array]:
        state = self._state(leaves)
        flight = state.carried[IN_FLIGHT]
        place = flight.enters.sharding
        no = jax.jit(jnp.zeros_like, out_shardings=place)(flight.enters)
        flight = dataclasses.replace(flight, enters=no)
        carried = state.carried | {IN_FLIGHT: flight}
        return jax.tree.leaves(dataclasses.replace(state, carried=carried))

    def _state(self, leaves: list[jax.Array]) -> TrainState:
        return jax.tree.unflatten(self.structure, leaves)


def make_step_program(
    placement: Placement,
    spec: StepSpec,
    batch_spec: BatchSpec,
    step: TrainStep,
    focus: Focus,
    first: StepProgram | None = None,
) -> StepProgram:
    """Make the jitted functions that step; each is compiled at its first call.

    Args:
      placement: where every leaf of the state is stored.
      spec: what is known about the step.
      batch_spec: the shapes of a global batch.
      step: the pure training step, of the state that the loss sees.
      focus: what it sees.
      first: the step of batches of other shapes, whose update and late gradients, if
        they are apart, this one has too; None if it is the first.
    """
    update, mesh = placement.update, batch_spec.mesh
    stored, structure = jax.tree.flatten(placement.packed_shardings)
    scales = spec.precision.scales_loss
    given = focused(step, focus), focus, placement, structure, scales
    flat, replicated = _FlatStep(*given), NamedSharding(mesh, P())
    jitted = functools.partial(
        jax.jit, compiler_options=compiler_options(spec.settings)
    )
    stepping = functools.partial(
        jitted, out_shardings=(stored, replicated, replicated), donate_argnums=0
    )
    taken = (stored, batch_spec.shardings)
    if not isinstance(update, HostUpdate):
        jit = stepping(flat.step, in_shardings=taken)
        if not spec.execution.delay:
            return OneJit(jit)
        empty = functools.partial(_zeros, batch_spec.structs())
        made = jax.jit(empty, out_shardings=batch_spec.shardings)
        return UnderWay(jit, structure, spec.execution, made)
    places = _places_of_reduced(placement, update)
    gradients = jitted(flat.gradients, in_shardings=taken, out_shardings=places)
    if isinstance(first, HostBetween | DelayedHost):
        return first.with_gradients(gradients)
    plain = HostBetween(
        gradients,
        stepping(flat.update, in_shardings=(stored, places)),
        update,
        structure,
        places,
    )
    if update.delay_after is None:
        return plain
    late = without_state(places)
    mixed = dataclasses.replace(places, grads=(), late=late)
    alone = {"in_shardings": (stored, late), "out_shardings": stored}
    return DelayedHost(
        plain,
        stepping(flat.update, in_shardings=(stored, mixed)),
        jitted(flat.apply, **alone, donate_argnums=0),
        update.delay_after,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _FlatStep:
    """The pure functions of a step on the leaves of its state.

    Their arguments are those that compiled programs name: ``state[0]`` and so on.

    Attributes:
      pure: the step.
      focus: what it sees of the state.
      placement: where every leaf is stored.
      structure: of the state.
      scales_loss: whether the loss is scaled.
    """

    pure: TrainStep
    focus: Focus
    placement: Placement
    structure: Any
    scales_loss: bool

    def step(self, state: list, batch: Batch) -> Stepped:
        """All of it."""
        return self._stepped(self.pure, state, batch)

    def update(self, state: list, reduced: Reduced) -> Stepped:
        """Its second half."""
        return self._stepped(self.pure.update, state, reduced)

    def gradients(self, state: list, batch: Batch) -> Reduced:
        """Its first half; the gradients that the host is given are there."""
        with on_abstract_mesh(self.placement.mesh):
            reduced = self.pure.gradients(self._state(state), batch)
        grads, form = jax.tree.flatten(reduced.grads)
        for number in self.placement.host_grads:
            grads[number] = to_host(grads[number])
        return dataclasses.replace(reduced, grads=jax.tree.unflatten(form, grads))

    def apply(self, state: list, late: Reduced) -> list:
        """The optimizer's update alone."""
        with on_abstract_mesh(self.placement.mesh):
            return jax.tree.leaves(self.pure.apply(self._state(state), late))

    def _state(self, leaves: list) -> TrainState:
        return jax.tree.unflatten(self.structure, leaves)

    def _stepped(
        self, function: Callable[..., Any], leaves: list, given: Any
    ) -> Stepped:
        with on_abstract_mesh(self.placement.mesh):
            new, metrics = function(self._state(leaves), given)
        scaler = self.focus.carried(new)["loss_scale"]
        watched = [scaler.exhausted] if self.scales_loss else []
        return jax.tree.leaves(new), metrics, watched


def _zeros(structs: Batch) -> Batch:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)


def _places_of_reduced(placement: Placement, update: HostUpdate) -> Any:
    """The shardings of what the first program returns."""
    replicated = NamedSharding(placement.mesh, P())
    return Reduced(
        grads=update.grads_shardings(placement.shardings.params),
        norm=replicated,
        finite=replicated,
        applied=replicated,
        skipped=replicated,
        scale=replicated,
        factor=replicated,
        model_state=placement.packed_shardings.model_state,
        results=replicated,
        carry={
            name: part
            for name, part in placement.packed_shardings.carried.items()
            if name == PART
        },
    )
