"""What is compiled: the step and the evaluation, their shardings and donation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.batches import BatchSpec
from jaxpar.gradients import Partition
from jaxpar.inputs import Inputs, make_inputs
from jaxpar.layout import Layout
from jaxpar.loss import Loss, Sums
from jaxpar.loss_check import LossCheck, compared, next_shard, with_noise
from jaxpar.mesh import DATA, PIPE
from jaxpar.precision import make_precision
from jaxpar.row_draws import Constant
from jaxpar.state import TrainState
from jaxpar.types import Batch, Metrics, Params
from jaxpar.weighted import mean, merged
from jaxpar.xla_settings import compiler_options


@dataclasses.dataclass(frozen=True)
class Program:
    """An engine's compiled functions.

    Attributes:
      step: ``(leaves, batch) -> (leaves, metrics, exhausted)``; donates the leaves. The
        last is a list: of one flag where the loss is scaled, else empty.
      evaluate: ``(params, model_state, batch, step, key, is_kept, is_left_over) ->
        Sums``; parameters as they are kept, or (`is_kept` false) the logical ones.
      results: the metrics of the `Sums` of an evaluation's parts.
      loss_check: compares the loss of rows with that of their halves; None for not.
    """

    step: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped
    results: jax.stages.Wrapped
    loss_check: LossCheck | None

    def check_loss(self, state: Callable[[], TrainState], batch: Batch) -> None:
        """Refuse a loss that is not what the engine takes it for, where that is asked.

        Args:
          state: gives what is kept of the state.
          batch: on the mesh.
        """
        if self.loss_check is not None:
            self.loss_check.before_step(state, batch)

    def evaluated(
        self,
        parts: tuple[Batch | None, Batch | None],
        params: Params,
        state: TrainState,
        *,
        is_kept: bool,
    ) -> Metrics:
        """Evaluate the two parts of a batch, as `BatchSpec.put_any` gives them.

        Args:
          parts: the rows that data divides, and those left over.
          params: the parameters.
          state: what else is needed of the train state.
          is_kept: whether the parameters are as they are kept.
        """
        model_state, step, key = state.model_state, state.step, state.key
        sums = [
            self.evaluate(params, model_state, part, step, key, is_kept, is_left_over)
            for part, is_left_over in zip(parts, (False, True), strict=True)
            if part is not None
        ]
        return self.results(sums)


def make_program(
    layout: Layout,
    batch_spec: BatchSpec,
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    evaluation: Callable[..., Sums],
    loss_check: LossCheck | None,
) -> Program:
    """Name what is compiled; nothing is compiled before its first call.

    Args:
      layout: where every leaf of the state is stored.
      batch_spec: the shapes of a global batch.
      step: the pure training step.
      evaluation: the pure evaluation.
      loss_check: as in `Program`.
    """
    mesh = batch_spec.mesh
    stored, structure = jax.tree.flatten(layout.kept_shardings)
    replicated = NamedSharding(mesh, P())

    def flat_step(state: list, batch: Batch) -> tuple[list, Metrics, list]:
        with _on(mesh):
            new, metrics = step(jax.tree.unflatten(structure, state), batch)
        watched = [new.loss_scale.exhausted] if layout.precision.scales_loss else []
        return jax.tree.leaves(new), metrics, watched

    def evaluate(params, model_state, batch, step, key, is_kept, is_left_over) -> Sums:
        with _on(mesh):
            computed = layout.update.computed(params) if is_kept else params
            inputs = make_inputs(batch, step)
            return evaluation(computed, model_state, inputs, key, is_left_over)

    return Program(
        step=jax.jit(
            flat_step,
            in_shardings=(stored, batch_spec.shardings),
            out_shardings=(stored, replicated, replicated),
            donate_argnums=0,
            compiler_options=compiler_options(layout.settings),
        ),
        evaluate=jax.jit(evaluate, out_shardings=replicated, static_argnums=(5, 6)),
        results=jax.jit(_results, out_shardings=replicated),
        loss_check=loss_check,
    )


def make_loss_check(
    layout: Layout, partition: Partition, loss: Loss, tolerance: float
) -> LossCheck:
    """Name what is compiled to check a loss function.

    Args:
      layout: where every leaf of the state is stored.
      partition: how the loss function is run from shards.
      loss: the loss function.
      tolerance: relative.
    """
    execution, like, mesh = layout.execution, layout.abstract.params, layout.mesh
    fp32, replicated = make_precision("fp32"), NamedSharding(mesh, P())
    checked = dataclasses.replace(partition, precision=fp32, draws=Constant())
    forward = execution.make_forward(checked, loss, like, training=True)

    def on_shard(shards, inputs, model_state, key) -> dict[str, jax.Array]:
        def run(rows: Inputs, parts: int) -> Sums:
            return forward(shards, rows, model_state, key, parts)

        return compared(run, inputs, layout.accumulate, next_shard)

    def totals(shards, inputs, model_state, key) -> Sums:
        sums = forward(shards, inputs, model_state, key, 1)
        return sums.over_data(checked.exchange)

    def noisy(of: Partition, run: Callable[..., Any], *given: Any) -> Any:
        params, model_state, batch, step, key = given
        shards = of.views(with_noise(layout.update.computed(params)))
        return run(shards, make_inputs(batch, step), model_state, key)

    def compare(*given: Any) -> dict[str, jax.Array]:
        with _on(mesh):
            run = checked.mapped(on_shard, out_specs=P(None, DATA))
            return noisy(checked, run, *given)

    def whole(*given: Any) -> dict[str, jax.Array]:
        automatic = dataclasses.replace(checked, coupled=True)
        alone = execution.make_forward(automatic, loss, like, training=True)
        with _on(mesh):
            ours = noisy(checked, checked.mapped(totals, out_specs=P()), *given)
            right = noisy(automatic, functools.partial(alone, parts=1), *given)
        return {"loss": jnp.stack([mean(ours.loss), mean(right.loss)])}

    fits = layout.accumulate == 1 and mesh.shape[PIPE] == 1
    return LossCheck(
        jax.jit(compare, out_shardings=replicated),
        jax.jit(whole, out_shardings=replicated) if fits else None,
        tolerance,
    )


def _results(parts: list[Sums]) -> Metrics:
    sums = functools.reduce(merged, parts)
    return sums.results() | {"weight": sums.loss.weight}


def _on(mesh: Mesh) -> Any:
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
