"""What are the gradients of one step: summed over micro-batches, reduced over data.

The loss of a step is sum(total) / sum(weight) over the global batch. Each micro-batch's
backward pass is seeded by scale / weight, so that fp16 totals don't overflow, and its
gradients are weighed back in fp32; one division at the end makes the sum exact, however
the rows are split. Where a ZeRO stage reduces once a step, nothing but scalars crosses
the data axis before that.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.deferred import Deferred, call_deferred
from jaxpar.mesh import DATA
from jaxpar.module import Network
from jaxpar.precision import Precision
from jaxpar.sharding.constrain import constrain
from jaxpar.sharding.exchange import (
    AutomaticExchange,
    Exchange,
    ManualExchange,
    from_view,
    manual_spec,
    to_view,
)
from jaxpar.sharding.zero import LeafPlan, ZeroStage
from jaxpar.types import Batch, LossFn, Metrics, Params, PyTree
from jaxpar.weighted import Weighted, as_weighted, mean

OWN_METRICS = frozenset(
    {"loss", "weight", "grad_norm", "skipped", "loss_scale", "learning_rate"}
)
"""Names that a loss function's own metrics must leave free."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What one step adds up besides gradients.

    Attributes:
      loss: the loss's total and weight.
      metrics: the user's metrics, likewise.
    """

    loss: PyTree
    metrics: dict[str, PyTree]

    def means(self) -> Metrics:
        """Divide each by its weight."""
        return {"loss": mean(self.loss)} | {
            name: mean(value) for name, value in self.metrics.items()
        }


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a loss function on whole parameters is run from their shards.

    Attributes:
      network: the model.
      plans: the leaves' layouts, in flattening order.
      stage: the row of the ZeRO table.
      precision: the dtypes.
      mesh: the mesh.
      automatic: whether data stays automatic and every micro-batch is seen whole.
    """

    network: Network
    plans: tuple[LeafPlan, ...]
    stage: ZeroStage
    precision: Precision
    mesh: Mesh
    automatic: bool

    @property
    def exchange(self) -> Exchange:
        """How arrays cross the data axis."""
        if self.automatic:
            return AutomaticExchange()
        return ManualExchange(self.precision.reduce_dtype, self.platform)

    @property
    def platform(self) -> str:
        """The mesh's."""
        return self.mesh.devices.flat[0].platform

    def views(self, params: Params) -> list[jax.Array]:
        """The parameters at rest as their plans' views."""
        leaves = jax.tree.leaves(params)
        return [to_view(*x) for x in zip(self.plans, leaves, strict=True)]

    def prepare(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Do what is done to the parameters once a step: cast, gather, or nothing."""
        if self.stage.gather == "use":
            return list(shards)
        cast = [x.astype(self.precision.compute_dtype) for x in shards]
        return [
            self.exchange.gather(p, x) for p, x in zip(self.plans, cast, strict=True)
        ]

    def call(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[jax.Array],
        prepared: Sequence[jax.Array],
        *args: Any,
    ) -> Any:
        """Evaluate ``fn(whole leaves, *args)`` from what `differentiated` gives."""
        if self.stage.reduce == "step":
            return fn(list(leaves), *args)
        dtype, is_whole = self.precision.compute_dtype, self.stage.gather != "use"
        deferred = [
            Deferred(plan, slot, source, self.exchange, dtype, is_whole=is_whole)
            for plan, slot, source in zip(self.plans, leaves, prepared, strict=True)
        ]
        return call_deferred(fn, deferred, *args)

    def differentiated(
        self, shards: Sequence[jax.Array], prepared: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """What gradients are taken of: the whole leaves, or slots for their shards."""
        if self.stage.reduce == "step":
            return list(prepared)
        dtype = self.exchange.crossing_dtype(self.precision.compute_dtype)
        return [jnp.zeros(shard.shape, dtype) for shard in shards]

    def seed_weight(self, weight: jax.Array) -> jax.Array:
        """The weight that a micro-batch's backward pass is divided by."""
        return weight if self.stage.reduce == "step" else self.exchange.total(weight)

    def reduced(self, grads: Sequence[jax.Array]) -> list[jax.Array]:
        """Reduce over data what the backward pass has not reduced yet."""
        if self.stage.reduce == "microbatch":
            return list(grads)
        return [
            self.exchange.reduce(p, g) for p, g in zip(self.plans, grads, strict=True)
        ]

    def mapped(self, body: Callable, out_specs: Any) -> Callable:
        """Run ``body(shards, batch, *replicated)`` on views, each on its shard."""
        if self.automatic:
            return body
        specs = [manual_spec(plan) for plan in self.plans]

        def run(shards: list, batch: Batch, *replicated: Any) -> Any:
            return jax.shard_map(
                body,
                mesh=self.mesh,
                in_specs=(specs, P(DATA), *(P() for _ in replicated)),
                out_specs=out_specs,
                axis_names={DATA},
                check_vma=False,
            )(shards, batch, *replicated)

        return run


def make_gradients(
    partition: Partition, loss_fn: LossFn, params_like: Params, accumulate: int
) -> Callable[..., tuple[Params, Sums, PyTree]]:
    """Make ``(params, model_state, batch, key, scale) -> (grads, sums, model_state)``.

    Args:
      partition: how the loss function is run from shards.
      loss_fn: ``(model, batch) -> loss`` or ``(loss, metrics)``.
      params_like: a tree of the parameters' structure.
      accumulate: micro-batches a step.

    Returns:
      A pure function, to be traced under the mesh. Gradients are at rest specs, in the
      dtype that they crossed data in, of scale * sum(total) / sum(weight).
    """
    structure = jax.tree.structure(params_like)
    loss_of = make_loss(partition.network, loss_fn, structure, training=True)

    def microbatch(shards, prepared, model_state, key, scale, batch):
        def total(leaves: list) -> tuple[jax.Array, tuple]:
            sums, state = partition.call(
                loss_of, leaves, prepared, model_state, key, batch
            )
            return sums.loss.total, (sums, state)

        leaves = partition.differentiated(shards, prepared)
        _, pull, (sums, state) = jax.vjp(total, leaves, has_aux=True)
        weight = partition.seed_weight(sums.loss.weight)
        (grads,) = pull(jnp.where(weight > 0, scale / weight, 0.0))
        grads = [grad.astype(jnp.float32) * weight for grad in grads]
        return grads, sums, state

    def body(shards, batch, model_state, key, scale):
        prepared = partition.prepare(shards)
        key = partition.exchange.fold_shard(key)

        def one(model_state, index, rows):
            own = jax.random.fold_in(key, index)
            return microbatch(shards, prepared, model_state, own, scale, rows)

        grads, sums, state = _accumulated(one, model_state, batch, accumulate)
        sums = jax.tree.map(partition.exchange.total, sums)
        weight = sums.loss.weight
        inverse = jnp.where(weight > 0, 1.0 / weight, 0.0)
        grads = partition.reduced([grad * inverse for grad in grads])
        return grads, sums, state

    return gradients_on_shards(partition, structure, body)


def gradients_on_shards(
    partition: Partition, structure: Any, body: Callable[..., tuple]
) -> Callable[..., tuple[Params, Sums, PyTree]]:
    """Run ``body(shards, batch, model_state, key, scale)`` on every data shard's views.

    Args:
      partition: the leaves' layouts.
      structure: of the parameters.
      body: gives gradients as views at rest, sums over all data, and the model's state.

    Returns:
      What `make_gradients` does.
    """
    views = [manual_spec(plan) for plan in partition.plans]
    run = partition.mapped(body, out_specs=(views, P(), P()))

    def gradients(params, model_state, batch, key, scale):
        shards = partition.views(params)
        grads, sums, state = run(shards, batch, model_state, key, scale)
        grads = [from_view(*x) for x in zip(partition.plans, grads, strict=True)]
        return jax.tree.unflatten(structure, grads), sums, state

    return gradients


def make_loss(
    network: Network, fn: LossFn, structure: Any, *, training: bool
) -> Callable[..., tuple[Sums, PyTree]]:
    """Make ``(leaves, model_state, key, batch) -> (Sums, model_state)``."""

    def loss(leaves, model_state, key, batch):
        variables = (jax.tree.unflatten(structure, leaves), model_state)
        out, after = network.run(fn, variables, key, batch, training=training)
        sums = loss_sums(out, batch)
        kept = jax.tree.map(lambda new, old: new.astype(old.dtype), after, model_state)
        return sums, kept

    return loss


def loss_sums(out: Any, batch: Batch) -> Sums:
    """See what a loss function returned for a batch as sums and their weights.

    Raises:
      ValueError: if it is not a floating loss, or (loss, metrics), of scalars.
    """
    value, metrics = _loss_and_metrics(out)
    num_rows = jax.tree.leaves(batch)[0].shape[0]
    sums = Sums(
        as_weighted(value, "loss", num_rows),
        {name: as_weighted(x, name, num_rows) for name, x in metrics.items()},
    )
    _check_floating(value)
    return sums


def _check_floating(loss: Any) -> None:
    """Refuse a loss whose gradient would silently be zero."""
    dtype = jnp.result_type(loss.total if isinstance(loss, Weighted) else loss)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"loss_fn: the loss is {dtype}, which has no gradient; it must be "
            "floating. Return a mean of differentiable terms."
        )


def _loss_and_metrics(out: Any) -> tuple[Any, Mapping[str, Any]]:
    """Tell ``loss`` and ``(loss, metrics)`` apart."""
    if not isinstance(out, tuple):
        return out, {}
    if len(out) != 2 or not isinstance(out[1], Mapping):
        kinds = ", ".join(type(part).__name__ for part in out)
        raise ValueError(
            f"loss_fn: it returned a tuple of ({kinds}), but must return a loss, or "
            "(loss, metrics) with metrics a dict of scalars by name."
        )
    taken = sorted(OWN_METRICS & out[1].keys())
    if taken:
        raise ValueError(
            f"loss_fn: metrics {taken} are names of the engine's own metrics "
            f"({', '.join(sorted(OWN_METRICS))}); rename yours."
        )
    return out


def make_evaluation(
    partition: Partition, eval_fn: LossFn, params_like: Params
) -> Callable[..., Metrics]:
    """Make ``(params, model_state, batch, key) -> metrics``, without gradients."""
    structure = jax.tree.structure(params_like)
    loss_of = make_loss(partition.network, eval_fn, structure, training=False)

    def body(shards, batch, model_state, key):
        prepared = partition.prepare(shards)
        leaves = partition.differentiated(shards, prepared)
        sums, _ = partition.call(loss_of, leaves, prepared, model_state, key, batch)
        return jax.tree.map(partition.exchange.total, sums)

    return evaluation_on_shards(partition, body)


def evaluation_on_shards(
    partition: Partition, body: Callable[..., Sums]
) -> Callable[..., Metrics]:
    """Run ``body(shards, batch, model_state, key) -> Sums`` on every data shard."""
    run = partition.mapped(body, out_specs=P())

    def evaluation(params, model_state, batch, key):
        sums = run(partition.views(params), batch, model_state, key)
        return sums.means() | {"weight": sums.loss.weight}

    return evaluation


def microbatch_rows(batch: Batch, index: jax.Array | int, accumulate: int) -> Batch:
    """Pick micro-batch m: rows m, m + accumulate and so on.

    Of every data shard's rows these are the same as of the global batch.
    """

    def pick(x: jax.Array) -> jax.Array:
        split = x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:])
        return constrain(jax.lax.dynamic_index_in_dim(split, index, 1, False), DATA)

    return jax.tree.map(pick, batch)


def _accumulated(
    one: Callable[..., tuple], model_state: PyTree, batch: Batch, accumulate: int
) -> tuple[list[jax.Array], Sums, PyTree]:
    """Add up ``one(model_state, index, rows)`` over the micro-batches."""
    if accumulate == 1:
        return one(model_state, 0, batch)

    def add(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
        grads, sums, state = carry
        rows = microbatch_rows(batch, index, accumulate)
        new_grads, new_sums, state = one(state, index, rows)
        added = jax.tree.map(jnp.add, (grads, sums), (new_grads, new_sums))
        return (*added, state), None

    first = microbatch_rows(batch, 0, accumulate)
    shapes = jax.eval_shape(lambda: one(model_state, 0, first))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:2])
    carry, _ = jax.lax.scan(add, (*zeros, model_state), jnp.arange(accumulate))
    return carry
