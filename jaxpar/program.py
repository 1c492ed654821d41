"""What is compiled: the step and the evaluation, their shardings and donation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
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
from jaxpar.loss_check import (
    LossCheck,
    NoCheck,
    another_shard,
    compared,
    with_noise,
)
from jaxpar.mesh import DATA, PIPE
from jaxpar.precision import Precision
from jaxpar.row_draws import OfParts
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
      loss_check: compares the loss of rows with that of their halves.
      eval_check: the same of eval_fn.
    """

    step: jax.stages.Wrapped
    evaluate: jax.stages.Wrapped
    results: jax.stages.Wrapped
    loss_check: NoCheck
    eval_check: NoCheck

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
        sums: list[Sums] = []
        for part, is_left_over in zip(parts, (False, True), strict=True):
            if part is None:
                continue
            if jax.process_count() > 1:  # As of `RunAhead.finish_before_others`.
                jax.block_until_ready(sums)
            given = params, model_state, part, step, key, is_kept, is_left_over
            sums.append(self.evaluate(*given))
        return self.results(sums)


def make_program(
    layout: Layout,
    batch_spec: BatchSpec,
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    evaluation: Callable[..., Sums],
    checks: Mapping[str, NoCheck],
) -> Program:
    """Name what is compiled; nothing is compiled before its first call.

    Args:
      layout: where every leaf of the state is stored.
      batch_spec: the shapes of a global batch.
      step: the pure training step.
      evaluation: the pure evaluation.
      checks: of "loss_fn", and of "eval_fn" where there is one.
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
        loss_check=checks["loss_fn"],
        eval_check=checks.get("eval_fn", NoCheck()),
    )


def make_loss_check(
    layout: Layout,
    partition: Partition,
    loss: Loss,
    precision: Precision,
    tolerance: float,
    *,
    training: bool,
) -> LossCheck:
    """Name what is compiled to check a loss function.

    Args:
      layout: where every leaf of the state is stored.
      partition: how the loss function is run from shards.
      loss: the loss function.
      precision: to compare in.
      tolerance: relative.
      training: whether the model is in training mode; else the loss is eval_fn's.
    """
    mesh, proved = layout.mesh, []
    replicated = NamedSharding(mesh, P())
    checked = dataclasses.replace(partition, precision=precision)
    forward_of = functools.partial(_forward_of, layout, loss, proved, training=training)
    neighbour = (lambda x: x) if checked.automatic else another_shard
    accumulate = layout.accumulate if training else 1

    def on_shard(shards, inputs, model_state, key) -> dict[str, jax.Array]:
        def found(*, constant: bool) -> dict[str, jax.Array]:
            def run(rows: Inputs, parts: int) -> Sums:
                forward = forward_of(checked, parts, constant=constant)
                return forward(shards, rows, model_state, key)

            return compared(run, inputs, accumulate, neighbour)

        proved.clear()
        drawn = found(constant=False)
        # Proved of the rows and not of their halves, they would differ.
        return drawn if len(set(proved)) < 2 else found(constant=True)

    def totals(shards, inputs, model_state, key) -> Sums:
        sums = forward_of(checked, 1)(shards, inputs, model_state, key)
        return sums.over_data(checked.exchange)

    def noisy(of: Partition, run: Callable[..., Any], *given: Any) -> Any:
        params, model_state, batch, step, key, noise = given
        shards = of.views(with_noise(layout.update.computed(params), noise))
        return run(shards, make_inputs(batch, step), model_state, key)

    def compare(*given: Any) -> dict[str, jax.Array]:
        with _on(mesh):
            run = checked.mapped(on_shard, out_specs=P(None, DATA))
            return noisy(checked, run, *given)

    def whole(*given: Any) -> dict[str, jax.Array]:
        automatic = dataclasses.replace(checked, coupled=True)
        with _on(mesh):
            ours = noisy(checked, checked.mapped(totals, out_specs=P()), *given)
            right = noisy(automatic, forward_of(automatic, 1), *given)
        return {"loss": jnp.stack([mean(ours.loss), mean(right.loss)])}

    fits = layout.accumulate == 1 and mesh.shape[PIPE] == 1
    return LossCheck(
        "loss_fn" if training else "eval_fn",
        jax.jit(compare, out_shardings=replicated),
        jax.jit(whole, out_shardings=replicated) if fits else None,
        tolerance,
    )


def _forward_of(
    layout: Layout,
    loss: Loss,
    proved: list[bool],
    of: Partition,
    parts: int,
    *,
    training: bool,
    constant: bool = False,
) -> Callable[..., Sums]:
    """Make the forward of so many micro-batches, each row with its own numbers."""
    draws = OfParts(parts, layout.mesh.shape[DATA], constant, proved.append)
    own = dataclasses.replace(of, draws=draws)
    like = layout.abstract.params
    forward = layout.execution.make_forward(own, loss, like, training=training)
    return functools.partial(forward, parts=parts)


def _results(parts: list[Sums]) -> Metrics:
    sums = functools.reduce(merged, parts)
    return sums.results() | {"weight": sums.loss.weight}


def _on(mesh: Mesh) -> Any:
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
