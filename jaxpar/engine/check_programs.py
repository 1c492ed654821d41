"""How are the programs built that check a loss to be a mean (`step.loss_check`)?"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiled.xla_flags import options_of_all
from jaxpar.engine.compiled_step import StepSpec
from jaxpar.engine.placement import Placement
from jaxpar.engine.tracing import ModelTrace, check_callbacks, precision_of_check
from jaxpar.mesh import PIPE, num_batch_shards, on_abstract_mesh, rows_spec
from jaxpar.sharding.memory_kinds import to_device
from jaxpar.step.inputs import Inputs, make_inputs
from jaxpar.step.loss import Loss, Sums
from jaxpar.step.loss_check import (
    LossCheck,
    NoCheck,
    another_shard,
    compared,
    other_half,
    with_noise,
)
from jaxpar.step.partition import Partition
from jaxpar.step.precision import Precision
from jaxpar.step.row_draws import OfParts
from jaxpar.step.weighted import mean


def make_loss_checks(
    placement: Placement,
    spec: StepSpec,
    partition: Partition,
    rows: Inputs,
    traced: ModelTrace,
    reasons: Mapping[str, str | None],
) -> dict[str, NoCheck]:
    """Make the checks of the loss functions, by argument.

    Args:
      placement: where every leaf of the state is stored.
      spec: what is known about the step.
      partition: how the loss function is run on shards.
      rows: shapes of one shard of a micro-batch.
      traced: the results of tracing the loss functions.
      reasons: why a loss is not checked; None if it is.

    Raises:
      ValueError: if a loss function that runs on shards calls the host.
    """
    network, abstract = partition.network, traced.abstract
    checks: dict[str, NoCheck] = {}
    if not partition.automatic:
        check_callbacks(traced.losses.values())
    for name, trace in traced.losses.items():
        if reasons[name]:
            checks[name] = NoCheck()
            continue
        exactly = precision_of_check(network, trace, abstract, spec.precision, rows)
        given = placement, spec, partition, trace.loss, *exactly
        checks[name] = make_loss_check(*given, training=trace.training)
    return checks


def make_loss_check(
    placement: Placement,
    spec: StepSpec,
    partition: Partition,
    loss: Loss,
    precision: Precision,
    tolerance: float,
    *,
    training: bool,
) -> LossCheck:
    """Make the jitted functions that check a loss function.

    Args:
      placement: where every leaf of the state is stored.
      spec: what is known about the step.
      partition: how the loss function is run on shards.
      loss: the loss function.
      precision: the precision of the check.
      tolerance: relative.
      training: whether to check loss_fn in training mode; False for eval_fn.
    """
    mesh, proved = placement.mesh, []
    checked = dataclasses.replace(partition, precision=precision)
    forward_of = functools.partial(
        _forward_of, placement, spec, loss, proved, training=training
    )
    neighbour = _neighbour_of(checked)
    accumulate = spec.accumulate if training else 1

    def on_shard(shards, inputs, model_state, key) -> dict[str, jax.Array]:
        def found(*, constant: bool) -> dict[str, jax.Array]:
            def run(rows: Inputs, parts: int) -> Sums:
                forward = forward_of(checked, parts, constant=constant)
                return forward(shards, rows, model_state, key)

            return compared(run, inputs, accumulate, neighbour)

        proved.clear()
        drawn = found(constant=False)
        # If draws are proved for the rows but not the halves, losses would differ.
        return drawn if len(set(proved)) < 2 else found(constant=True)

    def totals(*given: Any) -> Sums:
        return forward_of(checked, 1)(*given).over_data(checked.collectives)

    def noisy(of: Partition, run: Callable[..., Any], *given: Any) -> Any:
        weights, model_state, batch, step, key, noise = given
        noised = with_noise(placement.update.compute_params(weights[0]), noise)
        given = make_inputs(batch, step), model_state, key
        return run(of.views((noised, to_device(weights[1]))), *given)

    def compare(*given: Any) -> dict[str, jax.Array]:
        with on_abstract_mesh(mesh):
            run = checked.mapped(on_shard, out_specs=P(None, *rows_spec(mesh)))
            return noisy(checked, run, *given)

    def whole(*given: Any) -> dict[str, jax.Array]:
        automatic = dataclasses.replace(checked, coupled=True)
        with on_abstract_mesh(mesh):
            ours = noisy(checked, checked.mapped(totals, out_specs=P()), *given)
            right = noisy(automatic, forward_of(automatic, 1), *given)
        return {"loss": jnp.stack([mean(ours.loss), mean(right.loss)])}

    fits = spec.accumulate == 1 and mesh.shape[PIPE] == 1 and not checked.halves
    return LossCheck(
        loss.argument(training=training),
        _jitted(compare, mesh),
        _jitted(whole, mesh) if fits else None,
        tolerance,
    )


def _jitted(fn: Callable[..., Any], mesh: Mesh) -> jax.stages.Wrapped:
    """With results on every device."""
    everywhere, options = NamedSharding(mesh, P()), options_of_all(mesh)
    return jax.jit(fn, out_shardings=everywhere, compiler_options=options)


def _neighbour_of(of: Partition) -> Callable[[jax.Array], jax.Array]:
    """The rows that a shard's are mixed with, from its own."""
    if not of.automatic:
        return another_shard
    return other_half if of.halves else lambda x: x


def _forward_of(
    placement: Placement,
    spec: StepSpec,
    loss: Loss,
    proved: list[bool],
    of: Partition,
    parts: int,
    *,
    training: bool,
    constant: bool = False,
) -> Callable[..., Sums]:
    """Make the forward of `parts` micro-batches, with fixed draws for each row."""
    draws = OfParts(parts, num_batch_shards(placement.mesh), constant, proved.append)
    own = dataclasses.replace(of, draws=draws)
    like = placement.abstract.weights
    forward = spec.execution.make_forward(own, loss, like, training=training)
    return functools.partial(forward, parts=parts)
