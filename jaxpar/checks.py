"""What can be known to be wrong before anything compiles?

Plain arguments are looked at; the loss function is traced. One abstract trace of it on
a micro-batch tells whether it gives a scalar, whether a weight depends on parameters,
and which state the model changes.
"""

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from jaxpar import tree
from jaxpar.dependence import tainted_outputs
from jaxpar.draws import Draw, find_draws
from jaxpar.inputs import Inputs, OnePack, num_rows, twice_the_rows
from jaxpar.jaxprs import flops, has_dtype
from jaxpar.loss import Loss, make_loss
from jaxpar.loss_check import HALF_TOLERANCE, TOLERANCE
from jaxpar.mesh import AXES
from jaxpar.module import Network
from jaxpar.precision import Precision
from jaxpar.row_draws import (
    AsTraced,
    Rows,
    ShardKey,
    random_notes,
    row_dims,
    traced,
)
from jaxpar.state import TrainState
from jaxpar.types import Params, PyTree

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


@dataclasses.dataclass(frozen=True)
class LossTrace:
    """What tracing a loss function shows.

    Attributes:
      changes_state: whether the model changes its mutable state (keys do not count).
      flops: operations of the matrix products of one forward pass.
      draws: where it draws random numbers.
      random_notes: which of them depend on the mesh.
      tolerance: of the loss in fp32, split over rows; relative.
    """

    changes_state: bool
    flops: int
    draws: tuple[Draw, ...]
    random_notes: tuple[str, ...]
    tolerance: float


def trace_loss(
    network: Network,
    loss: Loss,
    abstract: TrainState,
    precision: Precision,
    rows: Inputs,
) -> LossTrace:
    """Trace a loss function on shapes and check what it returns.

    Args:
      network: the model.
      loss: the loss function.
      abstract: the train state's shapes.
      precision: the dtypes.
      rows: shapes of one shard of a micro-batch.

    Returns:
      What the trace shows.

    Raises:
      ValueError: if the loss or a metric is not a scalar, metrics are not a dict of
        free names, a weight depends on the parameters, or the model changes the shape
        of its state.
    """
    cast = tree.with_dtype(abstract.params, precision.compute_dtype)
    leaves, structure = jax.tree.flatten(cast)
    loss_of = make_loss(network, loss, structure, AsTraced(), training=True)

    def keyed(key: Any, leaves: list, model_state: PyTree, rows: Inputs) -> tuple:
        return loss_of(leaves, model_state, ShardKey(key, jnp.int32(0)), rows)

    key = jax.eval_shape(lambda: jax.random.key(0))
    closed, (sums, _) = traced(keyed, key, (leaves, abstract.model_state, rows))
    jaxpr = closed.jaxpr
    others = len(jaxpr.invars) - len(leaves) - 1
    outs = tainted_outputs(jaxpr, [False, *[True] * len(leaves), *[False] * others])
    names = list(tree.named_leaves(sums))
    for name, tainted in zip(names, outs[: len(names)], strict=True):
        if name.endswith("weight") and tainted:
            where = name.removesuffix("/weight").removeprefix("metrics/")
            raise ValueError(
                f"loss_fn: the weight of {where} depends on the parameters; "
                "jaxpar.Weighted(total, weight) needs a weight made of the batch "
                "alone (a count or a mask's sum). Divide inside total instead."
            )
    first = 1 + len(leaves)
    state_in = jaxpr.invars[first : first + len(jaxpr.outvars) - len(names)]
    changed = any(
        out is not inp
        for out, inp in zip(jaxpr.outvars[len(names) :], state_in, strict=True)
    )
    draws = tuple(find_draws(jaxpr))

    def twice() -> tuple:
        return leaves, abstract.model_state, twice_the_rows(rows)

    dims = row_dims(draws, keyed, key, Rows(num_rows(rows), twice))
    fp32 = jaxpr
    if precision.compute_dtype != jnp.float32:
        masters = jax.tree.leaves(abstract.params)
        fp32 = traced(keyed, key, (masters, abstract.model_state, rows))[0].jaxpr
    return LossTrace(
        changed,
        flops(jaxpr.eqns),
        draws,
        () if isinstance(rows.batch, OnePack) else random_notes(draws, dims),
        HALF_TOLERANCE if has_dtype(fp32, _HALF) else TOLERANCE,
    )


def trace_evaluation(
    network: Network,
    loss: Loss,
    abstract: TrainState,
    precision: Precision,
    rows: Inputs,
) -> None:
    """Trace an evaluation's loss function, given as to `trace_loss`.

    Raises:
      ValueError: if the loss or a metric is not a scalar, or metrics are not a dict of
        free names.
    """
    cast = tree.with_dtype(abstract.params, precision.compute_dtype)
    leaves, structure = jax.tree.flatten(cast)
    loss_of = make_loss(network, loss, structure, AsTraced(), training=False)

    def keyed(key: jax.Array, model_state: PyTree, rows: Inputs, *leaves: Any) -> Any:
        return loss_of(leaves, model_state, ShardKey(key, jnp.int32(0)), rows)

    jax.eval_shape(keyed, jax.random.key(0), abstract.model_state, rows, *leaves)
