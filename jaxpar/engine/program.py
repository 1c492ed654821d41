"""Which functions are compiled: the step and the evaluation, and their shardings."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiled.xla_flags import options_of_all
from jaxpar.engine.host_programs import StepProgram
from jaxpar.engine.placement import Placement
from jaxpar.mesh import on_abstract_mesh
from jaxpar.sharding.memory_kinds import to_device
from jaxpar.step.inputs import make_inputs
from jaxpar.step.layer_store import LayerStore, raise_failure
from jaxpar.step.loss import Sums
from jaxpar.step.loss_check import NoCheck
from jaxpar.step.state import TrainState
from jaxpar.step.weighted import merged
from jaxpar.types import Batch, Metrics, Params


@dataclasses.dataclass(frozen=True)
class Program:
    """An engine's compiled functions.

    Attributes:
      step: ``(leaves, batch) -> (leaves, metrics, exhausted)``, as `StepProgram`.
      evaluate: ``(weights, model_state, batch, step, key, is_packed, is_left_over) ->
        Sums``; the parameters are packed, or logical if `is_packed` is False.
      results: the metrics from the `Sums` of an evaluation's parts.
      loss_check: compares the loss of rows with that of their halves.
      eval_check: the same for eval_fn.
      stores: from where loops fetch parameters.
    """

    step: StepProgram
    evaluate: jax.stages.Wrapped
    results: jax.stages.Wrapped
    loss_check: NoCheck
    eval_check: NoCheck
    stores: Sequence[LayerStore] = ()

    def evaluated(
        self,
        parts: tuple[Batch | None, Batch | None],
        params: Params,
        state: TrainState,
        *,
        is_packed: bool,
    ) -> Metrics:
        """Evaluate the two parts of a batch that `BatchSpec.put_any` returns.

        Args:
          parts: the rows that data divides, and the left-over rows.
          params: the parameters that are trained.
          state: the train state, for all else.
          is_packed: whether the parameters are packed.
        """
        weights, model_state = (params, state.frozen), state.model_state
        step, key = state.step, state.key
        sums: list[Sums] = []
        for part, is_left_over in zip(parts, (False, True), strict=True):
            if part is None:
                continue
            if jax.process_count() > 1:  # See `RunAhead.finish_before_others`.
                jax.block_until_ready(sums)
            given = weights, model_state, part, step, key, is_packed, is_left_over
            sums.append(self.evaluate(*given))
        results = self.results(sums)
        if self.stores:
            jax.block_until_ready(results)
        raise_failure(self.stores)
        return results


def make_program(
    placement: Placement,
    step: StepProgram,
    evaluation: Callable[..., Sums],
    checks: Mapping[str, NoCheck],
) -> Program:
    """Make the jitted functions; each is compiled at its first call.

    Args:
      placement: where every leaf of the state that the loss sees is stored.
      step: the jitted step.
      evaluation: the pure evaluation.
      checks: for "loss_fn", and for "eval_fn" if there is one.
    """
    mesh = placement.mesh
    replicated = NamedSharding(mesh, P())

    def evaluate(
        weights, model_state, batch, step, key, is_packed, is_left_over
    ) -> Sums:
        with on_abstract_mesh(mesh):
            # Logical parameters are wherever a user's tree is placed.
            as_given = placement.update.compute_params if is_packed else to_device
            computed = as_given(weights[0]), to_device(weights[1])
            inputs = make_inputs(batch, step)
            return evaluation(computed, model_state, inputs, key, is_left_over)

    return Program(
        step=step,
        evaluate=jax.jit(
            evaluate,
            out_shardings=replicated,
            static_argnums=(5, 6),
            compiler_options=options_of_all(mesh),
        ),
        results=jax.jit(_results, out_shardings=replicated),
        loss_check=checks["loss_fn"],
        eval_check=checks.get("eval_fn", NoCheck()),
        stores=tuple(placement.update.layer_stores().values()),
    )


def _results(parts: list[Sums]) -> Metrics:
    sums = functools.reduce(merged, parts)
    return sums.results() | {"weight": sums.loss.weight}
