"""What steps: one jitted function, or several with work between them?

An update that is traced makes one, in which the state is donated. A `HostUpdate` works
on the host between two: the first computes gradients, the second takes the step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiled.xla_flags import compiler_options
from jaxpar.engine.batches import BatchSpec
from jaxpar.engine.compiled_step import StepSpec
from jaxpar.engine.focus import Focus, focused
from jaxpar.engine.placement import Placement
from jaxpar.engine.state_view import discard
from jaxpar.mesh import on_abstract_mesh
from jaxpar.optim.check_update import require_same
from jaxpar.sharding.memory_kinds import to_host
from jaxpar.step.reduction import PART
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import Reduced, TrainStep
from jaxpar.step.update import HostUpdate
from jaxpar.types import Batch, Metrics

Stepped = tuple[list[jax.Array], Metrics, list[jax.Array]]
"""The state's leaves, the metrics, and one flag where the loss is scaled: whether
gradients overflowed at the least scale."""


@runtime_checkable
class StepProgram(Protocol):
    """What steps."""

    def __call__(self, leaves: list[jax.Array], batch: Batch) -> Any:
        """Take a step; donates the state's leaves, and returns `Stepped`."""
        ...

    def traces(
        self, leaves: list[Any], batch: Batch
    ) -> Mapping[str, jax.stages.Traced]:
        """Trace its jitted functions, by name, in the order in which they run."""
        ...


@dataclasses.dataclass(frozen=True)
class OneJit:
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
class HostBetween:
    """A step of two jitted functions, and an update's work on the host between them.

    Attributes:
      gradients: ``(leaves, batch) -> Reduced``; donates nothing.
      update: ``(leaves, Reduced) -> Stepped``; donates the leaves.
      host: the update whose `HostUpdate.on_host` runs between the two.
      structure: of the state.
      places: the shardings of `Reduced`, a prefix of it.
    """

    gradients: jax.stages.Wrapped
    update: jax.stages.Wrapped
    host: HostUpdate
    structure: Any
    places: Reduced

    def __call__(self, leaves: list[jax.Array], batch: Batch) -> Any:
        """See `StepProgram`; waits for the gradients."""
        reduced = self.gradients(leaves, batch)
        state: TrainState = jax.tree.unflatten(self.structure, leaves)
        self.host.finish_step(state)
        grads, params, opt_state = self.host.on_host(
            reduced.grads,
            state.params,
            state.opt_state,
            factor=reduced.factor,
            applied=reduced.applied,
            loss=reduced.results["loss"],
        )
        name = f"{type(self.host).__name__}.on_host"
        before = {"params": state.params, "opt_state": state.opt_state}
        after = {"params": params, "opt_state": opt_state}
        given, found = ({"grads": reduced.grads, **before}, {"grads": grads, **after})
        require_same(name, "it takes", given, found)
        kept = set(map(id, jax.tree.leaves(after)))
        discard([x for x in jax.tree.leaves(before) if id(x) not in kept])
        state = dataclasses.replace(state, **after)
        reduced = dataclasses.replace(reduced, grads=grads)
        stepped: Stepped = self.update(jax.tree.leaves(state), reduced)
        self.host.finish_step(jax.tree.unflatten(self.structure, stepped[0]))
        return stepped

    def traces(self, leaves: list[Any], batch: Batch) -> dict[str, jax.stages.Traced]:
        """See `StepProgram`."""
        first = self.gradients.trace(leaves, batch)
        reduced = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            first.out_info,
            jax.tree.broadcast(self.places, first.out_info),
        )
        return {"gradients": first, "update": self.update.trace(leaves, reduced)}


def make_step_program(
    placement: Placement,
    spec: StepSpec,
    batch_spec: BatchSpec,
    step: TrainStep,
    focus: Focus,
) -> StepProgram:
    """Make the jitted functions that step; each is compiled at its first call.

    Args:
      placement: where every leaf of the state is stored.
      spec: what is known about the step.
      batch_spec: the shapes of a global batch.
      step: the pure training step, of the state that the loss sees.
      focus: what it sees.
    """
    mesh, update = batch_spec.mesh, placement.update
    step = focused(step, focus)
    stored, structure = jax.tree.flatten(placement.packed_shardings)
    replicated = NamedSharding(mesh, P())
    jitted = functools.partial(
        jax.jit, compiler_options=compiler_options(spec.settings)
    )
    stepping = functools.partial(
        jitted, out_shardings=(stored, replicated, replicated), donate_argnums=0
    )

    def flat(function: Callable[..., tuple[TrainState, Metrics]]) -> Callable[..., Any]:
        def flat_step(state: list, batch: Any) -> Any:
            with on_abstract_mesh(mesh):
                new, metrics = function(jax.tree.unflatten(structure, state), batch)
            scaler = focus.carried(new)["loss_scale"]
            watched = [scaler.exhausted] if spec.precision.scales_loss else []
            return jax.tree.leaves(new), metrics, watched

        return flat_step

    def flat_update(state: list, reduced: Reduced) -> Any:
        return flat(step.update)(state, reduced)

    def gradients(state: list, batch: Batch) -> Reduced:
        with on_abstract_mesh(mesh):
            reduced = step.gradients(jax.tree.unflatten(structure, state), batch)
        grads, form = jax.tree.flatten(reduced.grads)
        for number in placement.host_grads:
            grads[number] = to_host(grads[number])
        return dataclasses.replace(reduced, grads=jax.tree.unflatten(form, grads))

    taken = (stored, batch_spec.shardings)
    if not isinstance(update, HostUpdate):
        return OneJit(stepping(flat(step), in_shardings=taken))
    places: Any = Reduced(
        grads=update.grads_shardings(placement.shardings.params),
        norm=replicated,
        finite=replicated,
        applied=replicated,
        scale=replicated,
        factor=replicated,
        model_state=placement.packed_shardings.model_state,
        results=replicated,
        carry=placement.packed_shardings.carried.get(PART, ()),
    )
    return HostBetween(
        jitted(gradients, in_shardings=taken, out_shardings=places),
        stepping(flat_update, in_shardings=(stored, places)),
        update,
        structure,
        places,
    )
