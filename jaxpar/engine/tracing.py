"""What is learned from tracing a model once, before sharding it?

The model, its loss functions and the optimizer's init are traced on the shapes of one
shard of a micro-batch: the state's shapes, the FLOPs, the random draws, whether the
model's state depends on examples, and in a pipeline the cost of a block.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from jaxpar import tree
from jaxpar.engine.checks import check_trainable, of_trained
from jaxpar.engine.coupled_state import check_uncoupled, coupled_state
from jaxpar.jaxprs.dependence import differentiable_inputs, tainted_outputs
from jaxpar.jaxprs.draws import Draw, find_draws
from jaxpar.jaxprs.evaluate import arrays_in, equations, flops
from jaxpar.model.axis_names import bind_axes
from jaxpar.model.bridge import Network
from jaxpar.model.network import PipelineNetwork
from jaxpar.model.trainable import Trainable, trainable_names
from jaxpar.optim.make_update import Optimizer
from jaxpar.pipeline.block_cost import BlockWork, trace_microbatch
from jaxpar.sharding.exchange import counting_means
from jaxpar.step.carried import Carried
from jaxpar.step.inputs import (
    Inputs,
    OnePack,
    num_rows,
    replicated_names,
    twice_the_rows,
)
from jaxpar.step.loss import Loss, make_loss
from jaxpar.step.loss_check import HALF_TOLERANCE, TOLERANCE
from jaxpar.step.precision import Precision, frozen_dtype, make_precision
from jaxpar.step.row_draws import (
    SIZE_ERRORS,
    AsTraced,
    BatchRows,
    ShardKey,
    random_notes,
    row_dims,
    traced,
)
from jaxpar.step.state import TrainState, make_init
from jaxpar.types import Params, PyTree

_CALLBACKS = ("debug_callback", "debug_print", "pure_callback", "io_callback")
"""Primitives that call the host, such as that of `jax.debug.print`."""

_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class LossTrace:
    """The results of tracing a loss function.

    Attributes:
      loss: the loss function.
      training: whether it was traced in training mode.
      jaxpr: the trace; its inputs are a key, the parameters, the model's state, rows.
      coupled_state: leaves of the model's mutable state that depend on examples -> on
        what of them (`jaxpar.engine.coupled_state`).
      draws: its random draws.
      random_notes: which of them depend on the mesh.
      averages: whether it averages over a micro-batch's shards (`jaxpar.batch_mean`).
      without_gradient: names of trained parameters that it has no gradient of: it does
        not use them, or stops their gradients.
      draws_alike: whether what it draws without rows is the same on all data shards.
    """

    loss: Loss
    training: bool
    jaxpr: core.Jaxpr
    coupled_state: Mapping[str, str]
    draws: tuple[Draw, ...]
    random_notes: tuple[str, ...]
    averages: bool
    without_gradient: frozenset[str]
    draws_alike: bool

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls of one forward pass."""
        return flops(self.jaxpr.eqns)


@dataclasses.dataclass(frozen=True)
class ModelTrace:
    """The results of tracing a run's functions.

    Attributes:
      network: the model, with the axis names of its loss functions bound.
      init: makes the train state from a key.
      abstract: its shapes.
      losses: "loss_fn", and "eval_fn" if there is one -> its trace.
      block: what a block of the model costs; None without a pipeline.
    """

    network: Network
    init: Callable[[jax.Array], TrainState]
    abstract: TrainState
    losses: dict[str, LossTrace]
    block: BlockWork | None


def trace_model(
    network: Network,
    losses: tuple[Loss, Loss],
    optimizer: Optimizer,
    precision: Precision,
    rows: Inputs,
    carried: Sequence[Carried],
    trainable: Trainable | None = None,
    *,
    pipelined: bool,
) -> ModelTrace:
    """Trace a model with its loss functions and its optimizer's init.

    Args:
      network: the model.
      losses: for training and for evaluation; may be the same.
      optimizer: the optimizer.
      precision: the dtypes.
      rows: shapes of one shard of a micro-batch.
      carried: the parts of ``state.carried``.
      trainable: which parameters are trained; None for all.
      pipelined: whether the mesh has several stages.

    Raises:
      ValueError: as `trace_loss`, `trace_microbatch` and, in a pipeline,
        `check_uncoupled`, and if a parameter can't be trained.
    """

    def trained(params: Params) -> frozenset[str]:
        return trainable_names(trainable, list(tree.named_leaves(params)), network)

    block = None
    if pipelined and isinstance(network, PipelineNetwork):
        block = trace_microbatch(network, losses[0], rows, trained)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def trace(wrapped: Network) -> tuple[Any, TrainState, dict[str, LossTrace]]:
        params = jax.eval_shape(wrapped.init, key)[0]
        params, frozen = tree.parted(params, trained(params))
        check_trainable(params)
        init_opt_state = of_trained(optimizer.init, frozen)
        init = make_init(wrapped, init_opt_state, carried, trained)
        loss, evaluation = losses
        abstract = jax.eval_shape(init, key)
        given = abstract, precision, rows
        traces = {"loss_fn": trace_loss(wrapped, loss, *given, training=True)}
        if evaluation is not loss:
            other = trace_loss(wrapped, evaluation, *given, training=False)
            traces["eval_fn"] = other
        return init, abstract, traces

    bound, found = bind_axes(network, trace)
    if block is not None:
        check_uncoupled(found[2]["loss_fn"].coupled_state)
    return ModelTrace(bound, *found, block)


def trace_loss(
    network: Network,
    loss: Loss,
    abstract: TrainState,
    precision: Precision,
    rows: Inputs,
    *,
    training: bool,
) -> LossTrace:
    """Trace a loss function on shapes and check what it returns.

    Args:
      network: the model.
      loss: the loss function.
      abstract: the train state's shapes.
      precision: the dtypes.
      rows: shapes of one shard of a micro-batch.
      training: whether the model is in training mode.

    Returns:
      The trace.

    Raises:
      ValueError: if the loss or a metric is not a scalar, metrics are not a dict of
        free names, a weight depends on the parameters, or the model changes the shape
        of its state.
    """
    keyed, leaves = _of_key(network, loss, abstract, precision, training=training)
    key = jax.eval_shape(lambda: jax.random.key(0))
    with counting_means() as means:
        closed, (sums, _) = traced(keyed, key, (leaves, abstract.model_state, rows))
    jaxpr, names = closed.jaxpr, list(tree.named_leaves(sums))
    if training:
        _check_weights(jaxpr, names, len(jax.tree.leaves(abstract.params)))
    draws = tuple(find_draws(jaxpr))
    has_gradient = differentiable_inputs(jaxpr, names.index("loss/total"))[1:]
    trained = tree.named_leaves(abstract.params)
    unused = frozenset(n for n, has in zip(trained, has_gradient) if not has)  # noqa: B905
    if isinstance(rows.batch, OnePack) and means:
        raise ValueError(
            "loss: it calls jaxpar.batch_mean, but is given one pack of a "
            "jaxpar.Packed at a time, and packs of other shards are other calls. "
            "Average over the pack itself."
        )

    def twice() -> tuple:
        return leaves, abstract.model_state, twice_the_rows(rows)

    def of_twice() -> core.Jaxpr | None:
        # Packs change state one after another, and a shard has only its own.
        if isinstance(rows.batch, OnePack):
            return None
        try:
            return traced(keyed, key, twice())[0].jaxpr
        except SIZE_ERRORS:
            return None

    replicated = replicated_names(rows)
    is_row = [name not in replicated for name in tree.named_leaves(rows)]
    states = list(tree.named_leaves(abstract.model_state))
    coupled = coupled_state(jaxpr, states, is_row, of_twice)
    if isinstance(rows.batch, OnePack):  # A pack has its own key on any mesh.
        found = loss, training, jaxpr, coupled, draws, ()
        alike = not draws
        return LossTrace(*found, False, without_gradient=unused, draws_alike=alike)
    dims = row_dims(draws, keyed, key, BatchRows(num_rows(rows), twice))
    notes = random_notes(draws, dims)
    found = loss, training, jaxpr, coupled, draws, notes, bool(means), unused
    return LossTrace(*found, draws_alike=bool(dims) or not draws)


def _of_key(
    network: Network,
    loss: Loss,
    abstract: TrainState,
    precision: Precision,
    *,
    training: bool,
) -> tuple[Callable[..., tuple], list]:
    """Make ``(key, leaves, model_state, rows) -> (Sums, model_state)``; the leaves."""
    dtype = precision.compute_dtype
    frozen = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, frozen_dtype(x.dtype, dtype)),
        abstract.frozen,
    )
    cast = tree.with_dtype(abstract.params, dtype), frozen
    leaves, structure = jax.tree.flatten(cast)
    loss_of = make_loss(network, loss, structure, AsTraced(), training=training)

    def keyed(key: Any, leaves: list, model_state: PyTree, rows: Inputs) -> tuple:
        return loss_of(leaves, model_state, ShardKey(key, jnp.int32(0)), rows)

    return keyed, leaves


def _check_weights(jaxpr: core.Jaxpr, names: Sequence[str], num_params: int) -> None:
    """Raise if a weight among the named results depends on the parameters."""
    others = len(jaxpr.invars) - num_params - 1
    outs = tainted_outputs(jaxpr, [False, *[True] * num_params, *[False] * others])
    for name, tainted in zip(names, outs[: len(names)], strict=True):
        if name.endswith("weight") and tainted:
            where = name.removesuffix("/weight").removeprefix("metrics/")
            raise ValueError(
                f"loss_fn: the weight of {where} depends on the parameters; "
                "jaxpar.Weighted(total, weight) needs a weight computed from the batch "
                "alone (a count or a mask's sum). Divide inside total instead."
            )


def check_callbacks(traces: Iterable[LossTrace]) -> None:
    """Raise for calls to the host where the data axis is manual.

    Raises:
      ValueError: if a loss function prints, or calls Python, while it runs.
    """
    for trace in traces:
        for eqn in equations(trace.jaxpr):
            if eqn.primitive.name in _CALLBACKS:
                argument = "loss_fn" if trace.training else "eval_fn"
                line = source_info_util.summarize(eqn.source_info)
                raise ValueError(
                    f"{argument}: {eqn.primitive.name} at {line}: JAX can't call the "
                    "host from a program where only some mesh axes are manual (jax "
                    "0.12). Return the value as a metric, or pass coupled_batch=True "
                    "while you debug."
                )


def precision_of_check(
    network: Network,
    trace: LossTrace,
    abstract: TrainState,
    precision: Precision,
    rows: Inputs,
) -> tuple[Precision, float]:
    """Choose the precision and the tolerance of a loss's check.

    fp32, unless the loss function can't compute in it (a half-precision attention
    kernel) or needs more memory than the step. Arrays of twice the bytes fit, because
    the step stores activations. A single row on a shard is checked together with its
    neighbour's, which doubles the bytes.

    Args:
      network: the model.
      trace: the loss function's trace, in the step's precision.
      abstract: the train state's shapes.
      precision: the step's precision.
      rows: as for `trace_loss`.

    Returns:
      The precision, and the relative tolerance.
    """
    fp32, jaxpr = make_precision("fp32"), trace.jaxpr
    if precision.compute_dtype != jnp.float32:
        training = trace.training
        keyed, leaves = _of_key(network, trace.loss, abstract, fp32, training=training)
        key = jax.eval_shape(lambda: jax.random.key(0))
        try:
            closed, _ = traced(keyed, key, (leaves, abstract.model_state, rows))
        except SIZE_ERRORS:  # A kernel's NotImplementedError is one of them.
            return precision, HALF_TOLERANCE
        jaxpr, times = closed.jaxpr, 1 if num_rows(rows) > 1 else 2
        if times * _largest(jaxpr) > 2 * _largest(trace.jaxpr):
            return precision, HALF_TOLERANCE
    is_half = any(x.dtype in _HALF for x in arrays_in(jaxpr))
    return fp32, HALF_TOLERANCE if is_half else TOLERANCE


def _largest(jaxpr: core.Jaxpr) -> int:
    """Bytes of the largest array that a jaxpr computes."""
    return max((x.size * x.dtype.itemsize for x in arrays_in(jaxpr)), default=0)
