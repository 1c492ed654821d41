"""How does a step run whose update works on the host: two programs, and it between?

The first one computes gradients, the second one takes the step. With updates that are a
step late the host works while the devices compute the next gradients.

Source: Ren et al., "ZeRO-Offload" (2021), section 5.2: one-step delayed update.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxpar.engine.state_view import discard
from jaxpar.optim.check_update import require_same
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import Reduced
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

    def settled(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """The state with all that its steps have computed; donates the leaves."""
        return leaves

    def forget(self) -> None:
        """Forget what steps have computed and not applied: the state is another."""


@dataclasses.dataclass(frozen=True)
class HostBetween(StepProgram):
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
        """See `StepProgram`; waits for the gradients.

        Warns:
          UserWarning: if the step is taken and can't be finished, for the disk fails;
            the next one tries again, and raises the error if it can't.
        """
        reduced = self.gradients(leaves, batch)
        state = self.state(leaves)
        self.host.finish_step(state)
        stepped: Stepped = self.update(*self.begin(state, reduced)())
        try:
            self.host.finish_step(self.state(stepped[0]))
        except OSError as error:
            warnings.warn(
                f"{error}: the step is taken, but not on disk; the next one tries "
                "again. Make room, or repair the disk.",
                stacklevel=3,
            )
        return stepped

    def with_gradients(self, gradients: jax.stages.Wrapped) -> "HostBetween":
        """The step whose first function is another, for batches of other shapes."""
        return dataclasses.replace(self, gradients=gradients)

    def state(self, leaves: list[jax.Array]) -> TrainState:
        """The packed state."""
        return jax.tree.unflatten(self.structure, leaves)

    def begin(
        self, state: TrainState, reduced: Reduced
    ) -> Callable[[], tuple[list[jax.Array], Reduced]]:
        """Have the devices compute what the host's update of a state needs of them.

        Returns:
          A function that does the host's work: it returns the leaves and the gradients
          that the second program takes, and deletes the arrays that it replaces.
        """
        given = reduced.grads, state.params, state.opt_state
        finish = self.host.begin(*given, **reduced.for_update)

        def on_host() -> tuple[list[jax.Array], Reduced]:
            grads, params, opt_state = finish()
            name = f"{type(self.host).__name__}.on_host"
            before = {"params": state.params, "opt_state": state.opt_state}
            after = {"params": params, "opt_state": opt_state}
            given, found = {"grads": reduced.grads, **before}, {"grads": grads, **after}
            require_same(name, "it takes", given, found)
            kept = set(map(id, jax.tree.leaves(after)))
            discard([x for x in jax.tree.leaves(before) if id(x) not in kept])
            new = dataclasses.replace(state, **after)
            return jax.tree.leaves(new), dataclasses.replace(reduced, grads=grads)

        return on_host

    def traces(self, leaves: list[Any], batch: Batch) -> dict[str, jax.stages.Traced]:
        """See `StepProgram`."""
        first = self.gradients.trace(leaves, batch)
        reduced = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            first.out_info,
            jax.tree.broadcast(self.places, first.out_info),
        )
        return {"gradients": first, "update": self.update.trace(leaves, reduced)}


@dataclasses.dataclass(frozen=True)
class DelayedHost(StepProgram):
    """A step whose update is that of the last step's gradients.

    The state never has the last gradients in it; `settled` applies them.

    Attributes:
      plain: the step without delay, which the first ones are.
      update: as that of `plain`, of gradients that are ``Reduced.late``.
      apply: ``(leaves, Reduced) -> leaves``: an update in no step; donates the leaves.
      after: the first step with delay.
      pending: the last step's gradients, if they are not applied.
    """

    plain: HostBetween
    update: jax.stages.Wrapped
    apply: jax.stages.Wrapped
    after: int
    pending: list[Reduced] = dataclasses.field(default_factory=list)

    def __call__(self, leaves: list[jax.Array], batch: Batch) -> Any:
        """See `StepProgram`; waits for the last step."""
        state = self.plain.state(leaves)
        if int(state.step) < self.after:
            return self.plain(leaves, batch)
        last = self.pending[0] if self.pending else None
        on_host = last and self.plain.begin(state, last)
        reduced = self.plain.gradients(leaves, batch)
        if on_host:
            leaves, last = on_host()
        else:
            nothing = jnp.logical_and(reduced.applied, False)
            last = dataclasses.replace(without_state(reduced), applied=nothing)
        mixed = dataclasses.replace(reduced, grads=(), late=last)
        self.pending[:] = [without_state(reduced)]
        return self.update(leaves, mixed)

    def with_gradients(self, gradients: jax.stages.Wrapped) -> "DelayedHost":
        """As `HostBetween.with_gradients`; late gradients are those of both."""
        return dataclasses.replace(self, plain=self.plain.with_gradients(gradients))

    def settled(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """See `StepProgram`."""
        if not self.pending:
            return leaves
        leaves, last = self.plain.begin(self.plain.state(leaves), self.pending.pop())()
        return self.apply(leaves, last)

    def forget(self) -> None:
        """See `StepProgram`."""
        self.pending.clear()

    def traces(self, leaves: list[Any], batch: Batch) -> Mapping[str, Any]:
        """See `StepProgram`: those of a step without delay."""
        return self.plain.traces(leaves, batch)


def without_state(reduced: Reduced) -> Reduced:
    """What an update needs of a step's gradients."""
    return dataclasses.replace(reduced, model_state=(), carry=())
