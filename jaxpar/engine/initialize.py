"""How is an engine made from its arguments: checked, traced, sharded, compiled.

`initialize` lists the steps in order. It checks everything that can be checked before
compiling.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxpar import tree
from jaxpar.compiled.xla_flags import Value, choose_settings
from jaxpar.engine.batches import make_batch_spec
from jaxpar.engine.check_programs import make_loss_checks
from jaxpar.engine.checks import check_arguments, check_elements
from jaxpar.engine.compiled_step import StepSpec
from jaxpar.engine.engine import Engine
from jaxpar.engine.placement import Placement
from jaxpar.engine.program import make_program
from jaxpar.engine.tracing import ModelTrace, trace_model
from jaxpar.mesh import PIPE, MeshShape, as_mesh, num_batch_shards
from jaxpar.model.axis_names import BoundNetwork
from jaxpar.model.bridge import UnderAxisRules, make_network
from jaxpar.model.trainable import Trainable
from jaxpar.optim.make_update import Optimizer, make_update
from jaxpar.pipeline.execution import Execution, make_execution
from jaxpar.pipeline.schedules.table import Schedule
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import Rules, compute_specs
from jaxpar.sharding.zero import ZeroStage, zero_stage
from jaxpar.step.carried import Carried
from jaxpar.step.gradients import Partition
from jaxpar.step.inputs import Inputs, abstract_inputs, check_packed
from jaxpar.step.loss import Loss, as_losses
from jaxpar.step.loss_check import why_not
from jaxpar.step.loss_scale import LossScaler
from jaxpar.step.precision import Precision, make_precision
from jaxpar.step.row_draws import AsTraced, OwnRows
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import TrainStep, make_train_step
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import Batch, LossFn, PyTree

_LARGE_BYTES = 1 << 20
"""Of the smallest variable that `Engine.explain` names if it is not a parameter."""


def initialize(  # noqa: PLR0913 - the one call that users make, all by keyword
    *,
    model: Any,
    loss_fn: LossFn,
    optimizer: Optimizer,
    sample_batch: Batch,
    mesh: MeshShape | Mesh | None = None,
    devices: Sequence[Any] | None = None,
    zero: int = 1,
    precision: str | Precision = "fp32",
    accumulate: int = 1,
    schedule: str | Schedule = "1f1b",
    clip_norm: float | None = None,
    carried: Sequence[Carried] = (),
    trainable: Trainable | None = None,
    seed: int = 0,
    rules: Rules | None = None,
    eval_fn: LossFn | None = None,
    coupled_batch: bool = False,
    check_loss: bool = True,
    allow_whole: Sequence[str] = (),
    xla_options: Mapping[str, Value | None] | None = None,
) -> Engine:
    """Make an engine that trains a Flax model on a mesh.

    Args:
      model: an NNX factory ``lambda rngs: MyModel(rngs=rngs)``, a Linen module, or a
        `jaxpar.PipelineModel`.
      loss_fn: ``(model, batch) -> loss`` or ``(loss, metrics)``: a mean over the
        examples it is given, or a `jaxpar.Weighted`. It may also take by name: key (a
        PRNG key of the micro-batch), step (an int32 scalar), training (a bool).
        Metrics are means too, or `jaxpar.Weighted`, `jaxpar.Sum`, `jaxpar.Max`.
      optimizer: any optax transformation, whose update gets ``value=`` (the loss) and
        ``grad=`` if it takes them, and nothing else; or one of `jaxpar.optim`, or any
        object that makes its own update (`jaxpar.optim.MakesUpdate`).
      sample_batch: arrays or `jax.ShapeDtypeStruct`s of a global batch, rows first,
        except values wrapped in `jaxpar.Replicated`; or a `jaxpar.Packed` of them.
      mesh: devices by axis (all of them on data by default), or a mesh made by
        `jaxpar.make_mesh`.
      devices: the devices for a mesh shape, such as ``jax.devices()[:4]``; None for as
        many as the shape needs, the same number from each process.
      zero: ZeRO stage: 0 replicates, 1 shards the state, 2 gradients too, 3 gathers
        parameters at use.
      precision: "fp32", "bf16" or "fp16" compute, or a `jaxpar.Precision`. Masters are
        fp32. Parameters are cast, batches are not: with fp32 inputs a model computes in
        fp32, so cast them in loss_fn.
      accumulate: micro-batches a step.
      schedule: the pipeline schedule, if pipe > 1: "1f1b", "gpipe", "zero_bubble",
        "interleaved" (":4" for four chunks a stage), or a `jaxpar.Schedule`.
      clip_norm: the largest global norm of the gradients; None for no clipping.
      carried: what else the state keeps and a step updates, as ``[jaxpar.Ema(0.999)]``.
      trainable: path patterns of the parameters to train (``["*/lora_a"]``), or types
        of NNX Variables (``nnx.LoRAParam``); None for all. The others are stored
        sharded in their own dtypes, without gradients and moments.
      seed: of parameters, dropout and all other random numbers.
      rules: logical name -> mesh axis, path pattern -> PartitionSpec; they override
        Flax's ``logical_axis_rules`` in context.
      eval_fn: like loss_fn, for `Engine.evaluate`; None for loss_fn.
      coupled_batch: the loss couples examples (in-batch negatives): it sees full
        micro-batches. Implied by a model whose state depends on examples (batch
        statistics), and by a loss that averages over an unbound axis name.
      check_loss: whether to compare, before steps 1, 2, 4, 8 and so on, the loss of
        some rows with that of their halves (`jaxpar.step.loss_check`).
      allow_whole: path patterns of large parameters that may be replicated over data.
      xla_options: XLA option -> value, overriding those of `jaxpar.compiled.xla_flags`;
        None for XLA's default. `Engine.explain` prints the options that are set.

    Returns:
      An engine whose state is initialised, sharded, on the mesh. On compile-only
      devices the engine can only explain and lower its step.

    Raises:
      ValueError: if arguments are inconsistent; the message says which and why.
      TypeError: if `model` is not a Flax model, or `optimizer` neither an optax
        transformation nor one that makes its own update.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from flax import nnx
      >>> engine = initialize(
      ...     model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
      ...     loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2),
      ...     optimizer=optax.sgd(0.1),
      ...     sample_batch={"x": jnp.ones((8, 4))},
      ...     zero=3,
      ... )
      >>> first = engine.step({"x": jnp.ones((8, 4))})
      >>> bool(engine.step({"x": jnp.ones((8, 4))})["loss"] < first["loss"])
      True
    """
    arguments = {**locals(), "mesh": None, "devices": None}
    mesh = as_mesh(mesh, devices)
    check_arguments(optimizer, clip_norm, seed, carried)
    zero_row, precision = zero_stage(zero), make_precision(precision)
    losses = as_losses(loss_fn, eval_fn)
    check_packed(sample_batch, mesh.shape[PIPE], coupled_batch=coupled_batch)
    batch_spec = make_batch_spec(sample_batch, mesh, accumulate)
    splits = batch_spec.num_calls(accumulate)
    rows = abstract_inputs(batch_spec.rows(batch_spec.num_rows // splits))
    network = make_network(model, losses[0].on_sample, rows)
    arguments["sample_batch"] = batch_spec.rows(batch_spec.num_rows)
    arguments["model"] = UnderAxisRules(model, network.axis_rules)
    parts = (LossScaler(precision.scales_loss), *carried)
    given = network, losses, optimizer, precision, rows, parts, trainable
    traced = trace_model(*given, pipelined=mesh.shape[PIPE] > 1)
    execution = make_execution(network, mesh, schedule, accumulate, traced.block)
    leaves = _leaf_shardings(traced, execution, rules, zero_row, mesh, allow_whole)
    partition = _partition(traced, leaves, zero_row, precision, mesh, coupled_batch)
    update = _update(optimizer, partition, traced.abstract)
    placement = _placement(traced, leaves, partition, update, parts)
    reasons = _why_not_checked(traced, rows, partition, splits, asked=check_loss)
    spec = StepSpec(
        execution=execution,
        precision=precision,
        accumulate=accumulate,
        coupled=partition.coupled,
        averages=any(trace.averages for trace in traced.losses.values()),
        settings=choose_settings(mesh, xla_options),
        forward_flops=traced.losses["loss_fn"].flops * splits,
        remarks=_remarks(traced, partition, reasons),
    )
    checks = make_loss_checks(placement, spec, partition, rows, traced, reasons)
    step = _train_step(placement, spec, partition, losses[0], clip_norm)
    evaluate = execution.make_evaluation(partition, losses[1], traced.abstract.weights)
    program = make_program(placement, spec, batch_spec, step, evaluate, checks)
    state = placement.initial_state(traced.init, seed)
    return Engine(network, placement, spec, batch_spec, program, state, arguments)


def _leaf_shardings(
    traced: ModelTrace,
    execution: Execution,
    rules: Rules | None,
    zero_row: ZeroStage,
    mesh: Mesh,
    allow_whole: Sequence[str],
) -> dict[str, LeafSharding]:
    """Choose the storage and compute specs of every leaf."""
    network, params = traced.network, tree.merged(*traced.abstract.weights)
    check_elements(params, mesh)
    leaves, sizes = tree.named_leaves(params), mesh.shape
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    names, flax_rules = network.dim_names(), network.axis_rules
    compute = compute_specs(shapes, names, rules or {}, sizes, flax_rules)
    return execution.shard_leaves(leaves, compute, zero_row, sizes, allow_whole)


def _partition(
    traced: ModelTrace,
    leaves: Mapping[str, LeafSharding],
    zero_row: ZeroStage,
    precision: Precision,
    mesh: Mesh,
    coupled_batch: bool,
) -> Partition:
    """How the loss function is run on shards."""
    network = traced.network
    is_bound = isinstance(network, BoundNetwork)
    couples = bool(traced.losses["loss_fn"].coupled_state)
    coupled = coupled_batch or couples or is_bound
    trained, frozen = (
        tuple(leaves[name] for name in tree.named_leaves(some))
        for some in traced.abstract.weights
    )
    given = network, trained, frozen, zero_row, precision, mesh, coupled
    partition = Partition(*given, AsTraced())
    if partition.automatic:
        return partition
    return dataclasses.replace(partition, draws=OwnRows(num_batch_shards(mesh)))


def _placement(
    traced: ModelTrace,
    leaves: dict[str, LeafSharding],
    partition: Partition,
    update: Update,
    parts: Sequence[Carried],
) -> Placement:
    """How the run's state is stored."""
    former = traced.network.former_names
    stored = traced.abstract, leaves, partition.zero, update, parts, former
    return Placement(partition.mesh, *stored)


def _update(optimizer: Optimizer, partition: Partition, abstract: TrainState) -> Update:
    """The optimizer, and how it stores the state."""
    shapes = abstract.params, abstract.opt_state
    dtype = partition.precision.compute_dtype
    spec = UpdateSpec(partition.leaves, partition.mesh, *shapes, dtype)
    return make_update(optimizer, spec)


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
    if partition.automatic:
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
    gradients = spec.execution.make_gradients(partition, loss, like, spec.accumulate)
    scales = spec.precision.scales_loss
    given = gradients, placement.update, placement.carried
    return make_train_step(*given, clip_norm=clip_norm, scales_loss=scales)
