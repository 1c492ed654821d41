"""What is a loss of an engine: its compiled functions, and what they see."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxpar.engine.compiled_step import CompiledStep
from jaxpar.engine.compiling import compiling
from jaxpar.engine.focus import Focus
from jaxpar.engine.host_programs import StepProgram
from jaxpar.engine.make_step import MadeStep
from jaxpar.engine.placement import Placement
from jaxpar.engine.program import Program, make_program
from jaxpar.engine.state_view import placed_params
from jaxpar.engine.step_program import make_step_program
from jaxpar.step.state import TrainState
from jaxpar.tree import near_match
from jaxpar.types import Batch, Metrics, Params


class LossStep(CompiledStep):
    """A loss, and its training step: ``engine.loss(name)``.

    Its step can be compiled to inspect it, as that of an engine with one loss.

    Args:
      placement: where every leaf of the engine's state is stored.
      made: the step.
      focus: what it sees of the state.
      program: its compiled functions.
      arguments: of `jaxpar.initialize`.
      others: the steps of batches of other shapes.

    Attributes:
      name: the loss's name; None if it is the only one.
      batch_spec: the shapes of a global batch.
      focus: as given.
      program: as given.
      others: as given.
    """

    def __init__(
        self,
        placement: Placement,
        made: MadeStep,
        focus: Focus,
        program: Program,
        arguments: Mapping[str, Any],
        others: Sequence["LossStep"] = (),
    ):
        super().__init__(placement, made.spec, arguments, seen=made.placement)
        self.name = focus.name
        self.batch_spec, self.focus, self.program = made.batch_spec, focus, program
        self.others = tuple(others)
        self._is_compiled = False

    def traces(self) -> Mapping[str, jax.stages.Traced]:
        """See `CompiledStep`."""
        leaves = jax.tree.leaves(self.placement.packed)
        return self.program.step.traces(leaves, self.batch_spec.structs())

    def put(self, batch: Batch) -> tuple["LossStep", Batch]:
        """Place a batch.

        Args:
          batch: as `Engine.step` takes it.

        Returns:
          The step of its shapes, and the batch on the mesh.

        Raises:
          ValueError: as `jaxpar.engine.batches.BatchSpec.put`.
        """
        own = self.of_shapes(batch)
        with self._naming_all():
            return own, own.batch_spec.put(batch)

    def put_any(
        self, batch: Batch
    ) -> tuple["LossStep", tuple[Batch | None, Batch | None]]:
        """As `put`, of any number of rows, in the two parts of an evaluation."""
        own = self.of_shapes(batch, any_rows=True)
        whole = own.spec.sees_others
        with self._naming_all():
            return own, own.batch_spec.put_any(batch, whole=whole)

    def of_shapes(self, batch: Batch, *, any_rows: bool = False) -> "LossStep":
        """The step of a batch's shapes; this one for a batch that none takes.

        Args:
          batch: as `Engine.step` takes it.
          any_rows: whether its rows may be of any number.
        """
        several = (self, *self.others) if self.others else ()
        fit = (x for x in several if x.batch_spec.fits(batch, any_rows=any_rows))
        return next(fit, self)

    @contextlib.contextmanager
    def _naming_all(self) -> Iterator[None]:
        """Add to an error of the sample's shapes that there are others."""
        try:
            yield
        except ValueError as error:
            if not self.others:
                raise
            known = "; ".join(str(each.batch_spec) for each in self.others)
            raise ValueError(f"{error} Or as in other_shapes: {known}.") from error

    def stepped(self, leaves: list[jax.Array], batch: Batch) -> Any:
        """Take a step, as `StepProgram`; the first one says that it compiles."""
        if self._is_compiled:
            return self.program.step(leaves, batch)
        platform = self.placement.mesh.devices.flat[0].platform
        with compiling(self.program.step, leaves, batch, platform=platform):
            found = self.program.step(leaves, batch)
        self._is_compiled = True
        return found

    def evaluated(
        self,
        parts: tuple[Batch | None, Batch | None],
        params: Params | None,
        state: TrainState,
    ) -> Metrics:
        """Evaluate the two parts of a batch.

        Args:
          parts: as `Program.evaluated` takes them.
          params: a user's parameters, of those that the loss trains; None for the
            state's.
          state: what the loss sees of the state, packed.
        """
        if params is None:
            return self.program.evaluated(parts, state.params, state, is_packed=True)
        used = placed_params(params, self.seen.on_devices().params)
        return self.program.evaluated(parts, used, state, is_packed=False)


def make_loss_step(
    placement: Placement,
    made: MadeStep,
    focus: Focus,
    arguments: Mapping[str, Any],
    first: StepProgram | None = None,
) -> LossStep:
    """Make a loss's jitted functions; each is compiled at its first call.

    Args:
      placement: where every leaf of the engine's state is stored.
      made: the step.
      focus: what it sees of the state.
      arguments: of `jaxpar.initialize`.
      first: as for `make_step_program`.
    """
    given = placement, made.spec, made.batch_spec, made.step, focus, first
    step = make_step_program(*given)
    program = make_program(made.placement, step, made.evaluate, made.checks)
    others = [
        make_loss_step(placement, each, focus, arguments, step) for each in made.others
    ]
    return LossStep(placement, made, focus, program, arguments, others)


def skipped_steps(
    losses: Mapping[str | None, LossStep], state: TrainState
) -> dict[str | None, int]:
    """The steps of each loss that were skipped before a state."""
    return {
        name: int(own.focus.carried(state)["loss_scale"].skipped)
        for name, own in losses.items()
    }


def unknown_loss(name: str | None, losses: Mapping[str | None, LossStep]) -> str:
    """The message for a loss that an engine hasn't."""
    if None in losses:
        return f"loss={name!r}: this engine has one loss, which has no name; omit loss."
    known = [str(each) for each in losses]
    if name is None:
        return (
            f"loss: this engine has {len(known)} losses; name one: "
            f"engine.step(batch, loss={known[0]!r}), and for explain, verify, budget "
            f"and lower engine.loss({known[0]!r}).explain(). They are "
            f"{', '.join(map(repr, known))}."
        )
    return (
        f"loss={name!r} is none of this engine's losses: "
        f"{', '.join(map(repr, known))}.{near_match(name, known)}"
    )
