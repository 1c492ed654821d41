"""How do the arguments of a run become an engine: checked, traced and bound.

Everything that can be checked is checked here, before anything compiles.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxpar import tree
from jaxpar.axis_names import BoundNetwork, bind_axes
from jaxpar.batches import BatchSpec, make_batch_spec
from jaxpar.checks import (
    LossTrace,
    check_arguments,
    check_callbacks,
    check_elements,
    check_trainable,
    precision_of_check,
    trace_loss,
)
from jaxpar.engine import Engine
from jaxpar.gradients import Partition
from jaxpar.inputs import Inputs, abstract_inputs, check_packed
from jaxpar.layout import Layout
from jaxpar.loss import Loss, as_losses
from jaxpar.loss_check import NoCheck, why_not
from jaxpar.mesh import DATA, PIPE, MeshShape, as_mesh
from jaxpar.module import Network, UnderAxisRules, make_network
from jaxpar.optim.fused import FusedOptimizer
from jaxpar.optim.making import make_update
from jaxpar.optim.update import Update
from jaxpar.pipeline.execution import Execution, make_execution
from jaxpar.pipeline.schedule import Schedule
from jaxpar.precision import Precision, make_precision
from jaxpar.program import Program, make_loss_check, make_program
from jaxpar.row_draws import AsTraced, OwnRows
from jaxpar.sharding.rules import Rules, compute_specs
from jaxpar.sharding.zero import LeafPlan, ZeroStage, zero_stage
from jaxpar.state import TrainState, make_init
from jaxpar.step import make_train_step
from jaxpar.types import Batch, LossFn, Params
from jaxpar.xla_settings import Value, choose_settings


def initialize(  # noqa: PLR0913 - the one call that users make, all by keyword
    *,
    model: Any,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | FusedOptimizer,
    sample_batch: Batch,
    mesh: MeshShape | Mesh | None = None,
    devices: Sequence[Any] | None = None,
    zero: int = 1,
    precision: str | Precision = "fp32",
    accumulate: int = 1,
    schedule: str | Schedule = "1f1b",
    clip_norm: float | None = None,
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
      optimizer: any optax transformation, or one of `jaxpar.optim`. Its update is
        given ``value=`` (the loss) and ``grad=`` where it takes them, and nothing else.
      sample_batch: arrays or `jax.ShapeDtypeStruct`s of a global batch, rows first,
        but for what is wrapped in `jaxpar.Replicated`; or a `jaxpar.Packed` of them.
      mesh: devices by axis (all of them on data by default), or a mesh made by
        `jaxpar.make_mesh`.
      devices: the devices that a shape is made of, such as ``jax.devices()[:4]``; None
        for the first ones that the shape takes, the same number of each process.
      zero: ZeRO stage: 0 replicates, 1 shards the state, 2 gradients too, 3 gathers
        parameters at use.
      precision: "fp32", "bf16" or "fp16" compute, or a `jaxpar.Precision`. Masters are
        fp32. Parameters are cast, batches are not: a model given fp32 inputs computes
        in fp32, so cast them in loss_fn.
      accumulate: micro-batches a step.
      schedule: of the pipeline, where the mesh has one: "1f1b", "gpipe", "zero_bubble",
        "interleaved" (":4" for four chunks a stage), or a `jaxpar.Schedule`.
      clip_norm: the largest global norm of the gradients; None for no clipping.
      seed: of parameters, dropout and whatever else is random.
      rules: logical name -> mesh axis, path pattern -> PartitionSpec; over Flax's
        ``logical_axis_rules`` in context.
      eval_fn: like loss_fn, for `Engine.evaluate`; None for loss_fn.
      coupled_batch: the loss couples examples (in-batch negatives): it is given whole
        micro-batches. Implied by a model that changes its state (batch statistics), and
        by a loss that averages over an axis name that nothing binds.
      check_loss: whether to compare, before steps 1, 2, 4, 8 and so on, the loss of
        some rows with that of their halves (`jaxpar.loss_check`).
      allow_whole: path patterns of large parameters that may stay whole over data.
      xla_options: XLA's option -> value, over those of `jaxpar.xla_settings`; None for
        XLA's default. `Engine.explain` prints what is set.

    Returns:
      An engine whose state is initialised, sharded, on the mesh. Where the mesh's
      devices are only to compile for, the engine can explain and lower its step.

    Raises:
      ValueError: if arguments do not fit each other; the message says which and why.
      TypeError: if `model` is not a Flax model, or `optimizer` not an optax
        transformation.

    Example:
      >>> import jax.numpy as jnp
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
    given = {**locals(), "mesh": None, "devices": None}
    mesh = as_mesh(mesh, devices)
    check_arguments(mesh, optimizer, clip_norm, seed)
    stage, precision = zero_stage(zero), make_precision(precision)
    losses = loss, _ = as_losses(loss_fn, eval_fn)
    check_packed(sample_batch, mesh.shape[PIPE], coupled_batch=coupled_batch)
    batch_spec = make_batch_spec(sample_batch, mesh, accumulate)
    given["sample_batch"] = batch_spec.rows(batch_spec.num_rows)  # Shapes, no arrays.
    splits = batch_spec.num_calls(accumulate)
    rows = abstract_inputs(batch_spec.rows(batch_spec.num_rows // splits))
    model_network = make_network(model, loss.on_sample, rows)
    given["model"] = UnderAxisRules(model, model_network.axis_rules)
    execution = make_execution(model_network, mesh, schedule, accumulate, loss, rows)
    trace = functools.partial(_trace, optimizer, seed, precision, losses, rows)
    network, (init, abstract, traces) = bind_axes(model_network, trace)
    plans = _plans(network, execution, abstract.params, rules, stage, mesh, allow_whole)
    own = traces["loss_fn"]
    partition = _partition(network, plans, stage, precision, mesh, own, coupled_batch)
    update = _update(optimizer, partition, abstract)
    reasons = _reasons(traces, rows, partition, splits, asked=check_loss)
    layout = Layout(
        mesh=mesh,
        abstract=abstract,
        plans=plans,
        stage=stage,
        coupled=partition.coupled,
        settings=choose_settings(mesh, xla_options),
        execution=execution,
        precision=precision,
        accumulate=accumulate,
        forward_flops=own.flops * splits,
        update=update,
        remarks=_remarks(partition, own, reasons),
    )
    checks = _checks(layout, partition, rows, traces, reasons)
    program = _program(layout, batch_spec, partition, losses, clip_norm, checks)
    state = layout.initial_state(init, seed)
    return Engine(model_network, layout, batch_spec, program, state, given)


def _partition(
    network: Network,
    plans: Mapping[str, LeafPlan],
    stage: ZeroStage,
    precision: Precision,
    mesh: Mesh,
    trace: LossTrace,
    coupled_batch: bool,
) -> Partition:
    """How the loss function is run from shards."""
    is_bound = isinstance(network, BoundNetwork)
    coupled = coupled_batch or trace.changes_state or is_bound
    given = network, tuple(plans.values()), stage, precision, mesh, coupled
    partition = Partition(*given, AsTraced())
    if partition.automatic:
        return partition
    return dataclasses.replace(partition, draws=OwnRows(mesh.shape[DATA]))


def _update(
    optimizer: optax.GradientTransformation | FusedOptimizer,
    partition: Partition,
    abstract: TrainState,
) -> Update:
    """The optimizer, and how it keeps the state."""
    shapes = abstract.params, abstract.opt_state
    plans, dtype = partition.plans, partition.precision.compute_dtype
    return make_update(optimizer, plans, partition.mesh, shapes, dtype)


def _reasons(
    traces: Mapping[str, LossTrace],
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
            trace.draws, rows, mesh, coupled=coupled, splits=splits, asked=asked
        )
        for name, trace in traces.items()
    }


def _remarks(
    partition: Partition, traced: LossTrace, reasons: Mapping[str, str | None]
) -> tuple[str, ...]:
    """What an explanation says of the loss, a line each."""
    lines = [
        f"{name}: not checked ({reason})."
        if reason
        else f"{name}: checked to be a mean over rows, at calls 1, 2, 4, 8, ..."
        for name, reason in reasons.items()
    ]
    if isinstance(partition.network, BoundNetwork):
        names = ", ".join(map(repr, partition.network.axis_names))
        lines.append(f"loss: axis name {names} stands for the whole micro-batch.")
    if partition.coupled:
        lines.append(
            "loss: it couples examples, so that accumulate changes it: every "
            "micro-batch is coupled by itself."
        )
    return (*lines, *(() if partition.automatic else traced.random_notes))


def _program(
    layout: Layout,
    batch_spec: BatchSpec,
    partition: Partition,
    losses: tuple[Loss, Loss],
    clip_norm: float | None,
    checks: Mapping[str, NoCheck],
) -> Program:
    """What is compiled; `losses` are of training and of evaluation."""
    execution, like = layout.execution, layout.abstract.params
    gradients = execution.make_gradients(partition, losses[0], like, layout.accumulate)
    scales = layout.precision.scales_loss
    step = make_train_step(
        gradients, layout.update, clip_norm=clip_norm, scales_loss=scales
    )
    evaluation = execution.make_evaluation(partition, losses[1], like)
    return make_program(layout, batch_spec, step, evaluation, checks)


def _checks(
    layout: Layout,
    partition: Partition,
    rows: Inputs,
    traces: Mapping[str, LossTrace],
    reasons: Mapping[str, str | None],
) -> dict[str, NoCheck]:
    """What compares the loss functions with themselves, by argument.

    Refuses what can't run on shards.
    """
    network, abstract, precision = partition.network, layout.abstract, layout.precision
    checks: dict[str, NoCheck] = {}
    if not partition.automatic:
        check_callbacks(traces.values())
    for name, trace in traces.items():
        if reasons[name]:
            checks[name] = NoCheck()
            continue
        exactly = precision_of_check(network, trace, abstract, precision, rows)
        training = trace.training
        checks[name] = make_loss_check(
            layout, partition, trace.loss, *exactly, training=training
        )
    return checks


def _trace(
    optimizer: optax.GradientTransformation | FusedOptimizer,
    seed: int,
    precision: Precision,
    losses: tuple[Loss, Loss],
    rows: Inputs,
    network: Network,
) -> tuple[Callable[[jax.Array], TrainState], TrainState, dict[str, LossTrace]]:
    """What makes the state, its shapes, and what tracing shows, by loss function."""
    check_trainable(jax.eval_shape(network.init, jax.random.key(seed))[0])
    init, (loss, evaluation) = make_init(network, optimizer), losses
    abstract = jax.eval_shape(init, jax.random.key(seed))
    given = abstract, precision, rows
    traces = {"loss_fn": trace_loss(network, loss, *given, training=True)}
    if evaluation is not loss:
        other = trace_loss(network, evaluation, *given, training=False)
        traces["eval_fn"] = other
    return init, abstract, traces


def _plans(
    network: Network,
    execution: Execution,
    params: Params,
    rules: Rules | None,
    stage: ZeroStage,
    mesh: Mesh,
    allow_whole: Sequence[str],
) -> dict[str, LeafPlan]:
    """Where every leaf is stored, and what the rules split of it."""
    check_elements(params, mesh)
    leaves, sizes = tree.named_leaves(params), mesh.shape
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    names, flax_rules = network.dim_names(), network.axis_rules
    compute = compute_specs(shapes, names, rules or {}, sizes, flax_rules)
    return execution.plan_leaves(leaves, compute, stage, sizes, allow_whole)
