"""What can be known to be wrong before anything compiles?

Plain arguments are looked at; the loss function is traced. One abstract trace of it on
a micro-batch tells whether it gives a scalar, whether a weight depends on parameters,
and which state the model changes.
"""

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util
from jax.sharding import AxisType, Mesh

from jaxpar import tree
from jaxpar.dependence import tainted_outputs
from jaxpar.draws import Draw, find_draws
from jaxpar.inputs import Inputs, OnePack, num_rows, twice_the_rows
from jaxpar.jaxprs import arrays_in, equations, flops
from jaxpar.loss import Loss, make_loss
from jaxpar.loss_check import HALF_TOLERANCE, TOLERANCE
from jaxpar.mesh import AXES
from jaxpar.module import Network
from jaxpar.precision import Precision, make_precision
from jaxpar.row_draws import (
    SIZE_ERRORS,
    AsTraced,
    Rows,
    ShardKey,
    random_notes,
    row_dims,
    traced,
)
from jaxpar.state import TrainState
from jaxpar.types import Params, PyTree

_CALLBACKS = ("debug_callback", "debug_print", "pure_callback", "io_callback")
"""Primitives that call the host: of `jax.debug.print`, for one."""

_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def check_arguments(
    mesh: Mesh, optimizer: Any, clip_norm: float | None, seed: int
) -> None:
    """Check what `jaxpar.initialize` is given and no other part looks at.

    Args:
      mesh: the mesh.
      optimizer: the optax transformation.
      clip_norm: the largest global norm of the gradients, or None.
      seed: the run's seed.

    Raises:
      ValueError: if a value is out of range, or the mesh not one of jaxpar's.
      TypeError: if `optimizer` is no optax transformation.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(
            f"seed={seed!r} must be an integer from 0 to 2**32 - 1: jax takes 32 bits "
            "of it, so that others would give the same key as one of these."
        )
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"mesh: its axes are {mesh.axis_names} of types {mesh.axis_types}, but "
            f"must be {AXES}, all automatic. Pass a jaxpar.MeshShape, or make the mesh "
            "by jaxpar.make_mesh."
        )
    _check_optimizer(optimizer)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(
            f"clip_norm={clip_norm!r} must be positive, or None for no clipping."
        )


def _check_optimizer(optimizer: Any) -> None:
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return
    shown, remedy = repr(optimizer), "call its factory, as in optax.adamw(1e-3)"
    if isinstance(optimizer, numbers.Real):
        remedy = f"a learning rate goes into one, as in optax.adamw({optimizer})"
    elif hasattr(optimizer, "tx"):
        shown = f"{type(optimizer).__name__}(...)"
        remedy = "pass the one that it holds, optimizer=tx for nnx.Optimizer(model, tx)"
    elif callable(optimizer):
        remedy += ", and pass a schedule to it, as in optax.adamw(schedule)"
    raise TypeError(
        f"optimizer={shown} must be an optax transformation, with init and update; "
        f"{remedy}."
    )


def check_trainable(params: Params) -> None:
    """Check that every parameter can have a gradient and an fp32 master.

    Args:
      params: shapes of the parameters, as the model makes them.

    Raises:
      ValueError: if there are none, or one is not of a real floating dtype.
    """
    named = tree.named_leaves(params)
    if not named:
        raise ValueError(
            "model: it has no parameters to train (nnx.Param, or Linen's params)."
        )
    for name, leaf in named.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"model: parameter {name} is {leaf.dtype}, but a parameter must be "
                "floating to be trained. Keep it in another nnx.Variable, or in "
                "another Linen collection than params."
            )


def check_elements(params: Params, mesh: Mesh) -> None:
    """Refuse a parameter without an element on several devices.

    Raises:
      ValueError: if there is one.
    """
    for name, leaf in tree.named_leaves(params).items():
        if not leaf.size and mesh.size > 1:
            raise ValueError(
                f"model: parameter {name} has shape {leaf.shape}, without an element, "
                "on which XLA crashes in programs of several devices (jax 0.11.2). "
                "Leave it out of the model, or train on one device."
            )


@dataclasses.dataclass(frozen=True)
class LossTrace:
    """What tracing a loss function shows.

    Attributes:
      loss: the loss function.
      training: whether it was traced in training mode.
      jaxpr: the trace, of a key, the parameters, the model's state and the rows.
      changes_state: whether the model changes its mutable state (keys do not count).
      draws: where it draws random numbers.
      random_notes: which of them depend on the mesh.
    """

    loss: Loss
    training: bool
    jaxpr: core.Jaxpr
    changes_state: bool
    draws: tuple[Draw, ...]
    random_notes: tuple[str, ...]

    @property
    def flops(self) -> int:
        """Operations of the matrix products of one forward pass."""
        return flops(self.jaxpr.eqns)


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
      What the trace shows.

    Raises:
      ValueError: if the loss or a metric is not a scalar, metrics are not a dict of
        free names, a weight depends on the parameters, or the model changes the shape
        of its state.
    """
    keyed, leaves = _of_key(network, loss, abstract, precision, training=training)
    key = jax.eval_shape(lambda: jax.random.key(0))
    closed, (sums, _) = traced(keyed, key, (leaves, abstract.model_state, rows))
    jaxpr, names = closed.jaxpr, list(tree.named_leaves(sums))
    if training:
        _check_weights(jaxpr, names, len(leaves))
    first = 1 + len(leaves)
    state_in = jaxpr.invars[first : first + len(jaxpr.outvars) - len(names)]
    changed = any(
        out is not inp
        for out, inp in zip(jaxpr.outvars[len(names) :], state_in, strict=True)
    )
    draws = tuple(find_draws(jaxpr))
    if isinstance(rows.batch, OnePack):  # It has a key of its own on any mesh.
        return LossTrace(loss, training, jaxpr, changed, draws, ())

    def twice() -> tuple:
        return leaves, abstract.model_state, twice_the_rows(rows)

    dims = row_dims(draws, keyed, key, Rows(num_rows(rows), twice))
    notes = random_notes(draws, dims)
    return LossTrace(loss, training, jaxpr, changed, draws, notes)


def _of_key(
    network: Network,
    loss: Loss,
    abstract: TrainState,
    precision: Precision,
    *,
    training: bool,
) -> tuple[Callable[..., tuple], list]:
    """Make ``(key, leaves, model_state, rows) -> (Sums, model_state)``; the leaves."""
    cast = tree.with_dtype(abstract.params, precision.compute_dtype)
    leaves, structure = jax.tree.flatten(cast)
    loss_of = make_loss(network, loss, structure, AsTraced(), training=training)

    def keyed(key: Any, leaves: list, model_state: PyTree, rows: Inputs) -> tuple:
        return loss_of(leaves, model_state, ShardKey(key, jnp.int32(0)), rows)

    return keyed, leaves


def _check_weights(jaxpr: core.Jaxpr, names: Sequence[str], num_params: int) -> None:
    """Refuse a weight, among the named results, that depends on the parameters."""
    others = len(jaxpr.invars) - num_params - 1
    outs = tainted_outputs(jaxpr, [False, *[True] * num_params, *[False] * others])
    for name, tainted in zip(names, outs[: len(names)], strict=True):
        if name.endswith("weight") and tainted:
            where = name.removesuffix("/weight").removeprefix("metrics/")
            raise ValueError(
                f"loss_fn: the weight of {where} depends on the parameters; "
                "jaxpar.Weighted(total, weight) needs a weight made of the batch "
                "alone (a count or a mask's sum). Divide inside total instead."
            )


def check_callbacks(traces: Iterable[LossTrace]) -> None:
    """Refuse calls to the host where the data axis is manual.

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
                    "host from a program whose data axis is manual and others are not "
                    "(jax 0.12). Return what you want to see as a metric, or pass "
                    "coupled_batch=True while you debug."
                )


def precision_of_check(
    network: Network,
    trace: LossTrace,
    abstract: TrainState,
    precision: Precision,
    rows: Inputs,
) -> tuple[Precision, float]:
    """Choose in which precision a loss is checked, and how exactly.

    In fp32, unless the loss function can't compute in it (an attention kernel of half
    precision) or needs more room than the step has: arrays of twice the bytes fit, for
    the step keeps activations. One row on a shard is checked with its neighbour's.

    Args:
      network: the model.
      trace: the loss function's, in the step's precision.
      abstract: the train state's shapes.
      precision: the step's.
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
        except SIZE_ERRORS:  # NotImplementedError of a kernel is one of them.
            return precision, HALF_TOLERANCE
        jaxpr, times = closed.jaxpr, 1 if num_rows(rows) > 1 else 2
        if times * _largest(jaxpr) > 2 * _largest(trace.jaxpr):
            return precision, HALF_TOLERANCE
    is_half = any(x.dtype in _HALF for x in arrays_in(jaxpr))
    return fp32, HALF_TOLERANCE if is_half else TOLERANCE


def _largest(jaxpr: core.Jaxpr) -> int:
    """Bytes of the largest array that is made."""
    return max((x.size * x.dtype.itemsize for x in arrays_in(jaxpr)), default=0)
