"""How is a loss's training step made: traced, sharded, as pure functions?

An engine has one loss, or several, each with a step of its own. Nothing is compiled.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar import tree
from jaxpar.compiled.xla_flags import choose_settings
from jaxpar.engine.batches import BatchSpec
from jaxpar.engine.check_programs import make_loss_checks
from jaxpar.engine.checks import (
    check_axes,
    check_carried_reads,
    check_choices,
    check_elements,
    check_fetched,
    check_micro_batches,
    check_same_state,
)
from jaxpar.engine.choose_reduction import choose_reduction, with_coded_gradients
from jaxpar.engine.compiled_step import StepSpec
from jaxpar.engine.computed_in import fp32_notes
from jaxpar.engine.focus import Focus
from jaxpar.engine.placement import Placement
from jaxpar.engine.prefetch import layer_bytes, loop_notes, prefetching
from jaxpar.engine.read_arguments import LossSpec, RunSpec
from jaxpar.engine.tracing import LossTrace, ModelTrace, trace_model
from jaxpar.jaxprs.choices import has_choices
from jaxpar.mesh import PIPE, num_batch_shards
from jaxpar.model.axis_names import BoundNetwork
from jaxpar.model.bridge import Network
from jaxpar.optim.make_update import Optimizer, make_update
from jaxpar.pipeline.execution import Execution, make_execution
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import compute_specs
from jaxpar.step.carried import Carried
from jaxpar.step.inputs import Inputs
from jaxpar.step.loops import chosen_shares, read_by_layer
from jaxpar.step.loss import Loss
from jaxpar.step.loss_check import NoCheck, why_not
from jaxpar.step.loss_scale import LossScaler
from jaxpar.step.partition import Partition
from jaxpar.step.reduction_part import reduction_parts
from jaxpar.step.row_draws import AsTraced, OwnRows
from jaxpar.step.state import TrainState, with_shard_parts
from jaxpar.step.train_step import TrainStep, make_train_step
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import PyTree

_LARGE_BYTES = 1 << 20
"""Of the smallest variable that `Engine.explain` names if it is not a parameter."""


@dataclasses.dataclass(frozen=True)
class MadeStep:
    """A loss's step, before it is compiled.

    Attributes:
      traced: what was learned of the model, and its init.
      placement: where every leaf of the state that it sees is stored.
      spec: what is known about the step.
      batch_spec: the shapes of a global batch.
      step: the pure training step.
      evaluate: the pure evaluation.
      checks: for "loss_fn", and for "eval_fn" if there is one.
      others: the steps of batches of other shapes, on the same state.
    """

    traced: ModelTrace
    placement: Placement
    spec: StepSpec
    batch_spec: BatchSpec
    step: TrainStep
    evaluate: Any
    checks: Mapping[str, NoCheck]
    others: tuple["MadeStep", ...] = ()


@dataclasses.dataclass(frozen=True)
class MadeRun:
    """The steps of an engine's losses, and their state.

    Attributes:
      network: the model, or all of them.
      placement: where every leaf of the state is stored.
      init: makes the state from a key.
      steps: loss -> its step; the name of a single one is None.
      focuses: loss -> what it sees of the state.
      arguments: those of `jaxpar.initialize` that rebuild the engine on another mesh.
    """

    network: Network
    placement: Placement
    init: Callable[[jax.Array], TrainState]
    steps: Mapping[str | None, MadeStep]
    focuses: Mapping[str | None, Focus]
    arguments: Mapping[str, Any]


def make_step(
    run: RunSpec, own: LossSpec, network: Network, *, first: MadeStep | None = None
) -> MadeStep:
    """Make a loss's step.

    Args:
      run: what all losses share.
      own: the loss, and what it is trained with.
      network: the model.
      first: the step of batches of other shapes whose state this one takes and
        returns; None for a state of its own.

    Raises:
      ValueError: if arguments are inconsistent.
    """
    mesh, losses, splits = run.mesh, (own.loss, own.evaluation), own.num_calls
    parts = (LossScaler(run.precision.scales_loss), *own.carried)
    given = network, losses, own.optimizer, run.precision, own.rows, parts
    traced = trace_model(*given, own.trainable, pipelined=mesh.shape[PIPE] > 1)
    asked = run.schedule, own.accumulate, traced.block
    execution = make_execution(network, mesh, *asked)
    leaves = _leaf_shardings(traced, execution, run, own.averages)
    partition = _partition(traced, leaves, run)
    given = traced, leaves, partition, parts, execution
    placement, partition = _placement(own, *given, first)
    check_micro_batches(placement.update, own.accumulate)
    check_carried_reads(placement.update, parts, placement.abstract)
    loss, averages = traced.losses["loss_fn"].jaxpr, traced.losses["loss_fn"].averages
    if has_choices(loss):
        alike = partition.automatic or traced.losses["loss_fn"].draws_alike
        check_choices(placement.update, draws_alike=alike)
        partition = dataclasses.replace(partition, chooses=True)
    partition = own.halves.applied(partition, averages=averages)
    partition, loops = prefetching(partition, loss, run.prefetch, own.accumulate)
    check = run.check_loss
    reasons = _why_not_checked(traced, own.rows, partition, splits, asked=check)
    spec = StepSpec(
        execution=execution,
        zero=partition.zero,
        precision=run.precision,
        accumulate=own.accumulate,
        coupled=partition.coupled,
        averages=any(trace.averages for trace in traced.losses.values()),
        settings=choose_settings(
            mesh,
            run.xla_options,
            layer_bytes(loops, partition),
            in_halves=partition.halves,
        ),
        shares=_shares(traced.losses["loss_fn"], partition),
        forward_flops=traced.losses["loss_fn"].flops * splits,
        precision_notes=fp32_notes(loss, run.precision),
        remarks=(
            *_remarks(traced, partition, reasons),
            *loop_notes(loops),
            *own.halves.notes(partition),
        ),
        changes_with=_changes_with(traced, partition.coupled, placement),
    )
    checks = make_loss_checks(placement, spec, partition, own.rows, traced, reasons)
    step = _train_step(placement, spec, partition, own.loss, own.clip_norm)
    like = traced.abstract.weights
    evaluate = execution.make_evaluation(partition, own.evaluation, like)
    return MadeStep(traced, placement, spec, own.batch_spec, step, evaluate, checks)


def _leaf_shardings(
    traced: ModelTrace,
    execution: Execution,
    run: RunSpec,
    averages: Mapping[str, str],
) -> dict[str, LeafSharding]:
    """Choose the storage and compute specs of every leaf."""
    network, params = traced.network, tree.merged(*traced.abstract.weights)
    check_elements(params, run.mesh)
    leaves, sizes = tree.named_leaves(params), run.mesh.shape
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    names, flax_rules = network.dim_names(), network.axis_rules
    compute = compute_specs(shapes, names, run.rules, sizes, flax_rules)
    given = leaves, compute, run.zero, sizes, run.allow_whole
    found = execution.shard_leaves(*given)
    for name, leaf in found.items():
        model, _, path = name.partition("/")
        if model in averages:
            beside = found[f"{averages[model]}/{path}"]
            found[name] = dataclasses.replace(beside, name=leaf.name)
    check_axes(found, run.mesh, flax_rules)
    return found


def _partition(
    traced: ModelTrace,
    leaves: Mapping[str, LeafSharding],
    run: RunSpec,
) -> Partition:
    """How the loss function is run on shards."""
    network = traced.network
    is_bound = isinstance(network, BoundNetwork)
    couples = bool(traced.losses["loss_fn"].coupled_state)
    coupled = run.coupled_batch or couples or is_bound
    trained, frozen = (
        tuple(leaves[name] for name in tree.named_leaves(some))
        for some in traced.abstract.weights
    )
    shared = run.zero, run.precision, run.mesh
    partition = Partition(network, trained, frozen, *shared, coupled, AsTraced())
    if partition.automatic:
        return partition
    return dataclasses.replace(partition, draws=OwnRows(num_batch_shards(run.mesh)))


def _placement(
    own: LossSpec,
    traced: ModelTrace,
    leaves: dict[str, LeafSharding],
    partition: Partition,
    parts: Sequence[Carried],
    execution: Execution,
    first: MadeStep | None,
) -> tuple[Placement, Partition]:
    """How the run's state is stored, and the partition with the update's reduction."""
    former, mesh = traced.network.former_names, partition.mesh
    if first is None:
        update = _update(own.optimizer, partition, traced, own.clip_norm)
        update = with_coded_gradients(update, partition)
    else:
        update = first.placement.update
        check_fetched(update, _by_layer(traced, partition))
    reduced = execution.communicated_shardings(partition.on_shard)
    reduction = choose_reduction(update.reduction, partition, reduced)
    like, batch = traced.abstract.weights, own.batch_spec.structs()
    parts = (
        *parts,
        *reduction_parts(reduction, reduced),
        *execution.parts(partition, own.loss, like, batch, update),
    )
    complete = functools.partial(with_shard_parts, carried=parts, mesh=mesh)
    abstract = jax.eval_shape(complete, traced.abstract)
    stored = abstract, leaves, partition.zero, update, parts, former
    zero = partition.zero.at_use if update.fetched else partition.zero
    if reduction.at_zero2 and zero.number == 2:
        zero = zero.once
    partition = dataclasses.replace(
        partition, reduction=reduction, zero=zero, stores=update.layer_stores()
    )
    placement = Placement(mesh, *stored)
    if first is not None:
        check_same_state(placement, first.placement)
        placement = first.placement
    return placement, partition


def _update(
    optimizer: Optimizer,
    partition: Partition,
    traced: ModelTrace,
    clip_norm: float | None,
) -> Update:
    """The optimizer, and how it stores the state."""
    shapes = traced.abstract.params, traced.abstract.opt_state
    dtype, by_layer = partition.precision.compute_dtype, _by_layer(traced, partition)
    given = partition.leaves, partition.mesh, *shapes, dtype, by_layer, clip_norm
    return make_update(optimizer, UpdateSpec(*given))


def _by_layer(traced: ModelTrace, partition: Partition) -> frozenset[str]:
    """The parameters that all loss functions read a layer at a time."""
    return frozenset.intersection(
        *(
            read_by_layer(trace.jaxpr, partition.all_leaves)
            for trace in traced.losses.values()
        )
    )


def _shares(loss: LossTrace, partition: Partition) -> dict[str, float]:
    """See `StepSpec.shares`; what is reduced once a step is reduced whole."""
    chosen = {}
    if partition.chooses and partition.zero.reduce == "microbatch":
        chosen = chosen_shares(loss.jaxpr, partition.all_leaves)
    return chosen | dict.fromkeys(loss.without_gradient, 0.0)


def _why_not_checked(
    traced: ModelTrace,
    rows: Inputs,
    partition: Partition,
    splits: int,
    *,
    asked: bool,
) -> dict[str, str | None]:
    """Why the loss functions are not checked, by argument."""
    mesh, coupled = partition.mesh, partition.coupled
    return {
        name: why_not(
            trace.draws,
            rows,
            mesh,
            coupled=coupled,
            splits=splits,
            asked=asked,
            averages=trace.averages,
        )
        for name, trace in traced.losses.items()
    }


def _changes_with(
    traced: ModelTrace, coupled: bool, placement: Placement
) -> dict[str, str]:
    """Which settings change the run's numbers, and why; see `StepSpec`."""
    loss, found = traced.losses["loss_fn"], {}
    if coupled or loss.averages:
        found["accumulate"] = "the loss couples the examples of a micro-batch"
    elif loss.draws:
        found["accumulate"] = "every micro-batch draws random numbers of its own"
    kept = [part.name for part in placement.carried if part.per_shard]
    if kept:
        found["mesh"] = f"every data shard keeps its own {', '.join(kept)}"
    return found


def _remarks(
    traced: ModelTrace, partition: Partition, reasons: Mapping[str, str | None]
) -> tuple[str, ...]:
    """Lines about the loss for `Engine.explain`."""
    lines = [
        f"{name}: not checked ({reason})."
        if reason
        else f"{name}: checked to be a mean over rows, at calls 1, 2, 4, 8, ..."
        for name, reason in reasons.items()
    ]
    if isinstance(partition.network, BoundNetwork):
        names = ", ".join(map(repr, partition.network.axis_names))
        lines.append(f"loss: axis name {names} is bound to the full micro-batch.")
    lines += _replicated_state(traced.abstract.model_state, partition.mesh)
    if partition.coupled:
        lines.append(
            "loss: it couples examples, so accumulate changes it: examples are coupled "
            "within a micro-batch only."
        )
    if partition.automatic and not partition.halves:
        return tuple(lines)
    return (*lines, *traced.losses["loss_fn"].random_notes)


def _replicated_state(model_state: PyTree, mesh: Mesh) -> list[str]:
    """A line about large variables that are not parameters."""
    sizes = {
        name: tree.num_bytes(x) for name, x in tree.named_leaves(model_state).items()
    }
    large = [name for name, size in sizes.items() if size >= _LARGE_BYTES]
    if not large or mesh.size == 1:
        return []
    held = sum(sizes[name] for name in large) / 1e6
    return [
        f"model_state: every device holds all of {', '.join(large[:3])} "
        f"({held:,.1f} MB in all), which are not parameters. A constant is stored "
        "sharded as an nnx.Param (or in Linen's params) that trainable= leaves out."
    ]


def _train_step(
    placement: Placement,
    spec: StepSpec,
    partition: Partition,
    loss: Loss,
    clip_norm: float | None,
) -> TrainStep:
    """The pure training step."""
    like = placement.abstract.weights
    # What is reduced between replicas at the end stays until then.
    between = any(leaf.reduced_between for leaf in partition.on_shard)
    ends_early = partition.replicas_at_once or not between
    if spec.accumulate == 1 and partition.zero.reduce != "step" and ends_early:
        partition = dataclasses.replace(partition, to_host=placement.early_grads)
    gradients = spec.execution.make_gradients(partition, loss, like, spec.accumulate)
    scales = spec.precision.scales_loss
    given = gradients, placement.update, placement.carried
    return make_train_step(
        *given,
        clip_norm=clip_norm,
        scales_loss=scales,
        pace=spec.execution.pace,
        took_batch=spec.execution.took_batch,
    )
