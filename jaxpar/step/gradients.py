"""How are a step's gradients computed: summed over micro-batches, reduced over data.

The loss of a step is sum(total) / sum(weight) over the global batch. Each micro-batch's
backward pass is seeded by scale / weight, so fp16 totals don't overflow, and its
gradients are multiplied by the weight in fp32. One division at the end makes the sum
exact, however the rows are split. Where a ZeRO stage reduces once a step, only scalars
are reduced over data before that.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import num_batch_shards, rows_spec
from jaxpar.step.halves import in_halves
from jaxpar.step.inputs import Inputs, microbatch_rows, with_keys
from jaxpar.step.loss import Loss, Sums, make_loss
from jaxpar.step.partition import Partition
from jaxpar.step.reduction_part import PART, of_own_part
from jaxpar.step.row_draws import OwnRows
from jaxpar.step.weighted import merged, of_no_examples
from jaxpar.types import Params, PyTree


def make_gradients(
    partition: Partition, loss: Loss, like: tuple[Params, Params], accumulate: int
) -> Callable[..., tuple[Params, Sums, PyTree, PyTree]]:
    """Make ``(weights, model_state, inputs, key, scale, carry) -> (grads, sums, ...)``.

    Args:
      partition: how the loss function is run from shards.
      loss: the loss function.
      like: of the structure of `TrainState.weights`.
      accumulate: micro-batches a step.

    Returns:
      A pure function, to be traced under the mesh. It returns the gradients of scale *
      sum(total) / sum(weight), at the storage specs, in the dtype of the reduction;
      the step's sums; the model's new state; and what the partition's reduction
      carries, as `carry`: a tree of arrays whose dim 0 is the data shards.
    """
    shards = num_batch_shards(partition.mesh)
    draws = OwnRows(2 * shards) if partition.halves else partition.draws
    given = partition.network, loss, jax.tree.structure(like), draws
    loss_of = make_loss(*given, training=True)
    if partition.halves:
        loss_of = in_halves(loss_of)

    def microbatch(shards, prepared, model_state, key, scale, inputs):
        def total(leaves: list) -> tuple[jax.Array, tuple]:
            sums, state = partition.call(
                loss_of, leaves, prepared, model_state, key, inputs
            )
            return sums.loss.total, (sums, state)

        leaves = partition.differentiated(shards, prepared)
        _, pull, (sums, state) = jax.vjp(total, leaves, has_aux=True)
        # The weight of all shards: a backward pass that is not linear (clipped or
        # rounded cotangents) then sees the same numbers as on one device.
        weight = partition.collectives.total(sums.loss.weight)
        (grads,) = pull(jnp.where(weight > 0, scale / weight, 0.0))
        if accumulate > 1:
            grads = [grad.astype(jnp.float32) * weight for grad in grads]
        return grads, sums, state

    def body(shards, inputs, model_state, key, scale, carry):
        prepared = partition.local(partition.on_shard, partition.prepare(shards), carry)
        key = partition.shard_key(key)

        def one(model_state, index, rows):
            own = key.fold_in(index)
            return microbatch(shards, prepared, model_state, own, scale, rows)

        grads, sums, state = _accumulated(one, model_state, inputs, accumulate)
        sums = sums.over_data(partition.collectives)
        if accumulate > 1:
            weight = sums.loss.weight
            inverse = jnp.where(weight > 0, 1.0 / weight, 0.0)
            grads = [grad * inverse for grad in grads]
        grads, carry = partition.reduced(grads, carry, scale)
        return grads, sums, state, carry

    return gradients_on_shards(partition, jax.tree.structure(like[0]), body)


def gradients_on_shards(
    partition: Partition,
    structure: Any,
    body: Callable[..., tuple],
    part: str = PART,
) -> Callable[..., tuple[Params, Sums, PyTree, PyTree]]:
    """Run ``body(shards, inputs, model_state, key, scale, carry)`` on every shard.

    Args:
      partition: the leaves' shardings.
      structure: of the trained parameters.
      body: is given views, and what this shard carries. It returns gradients as the
        reduction does, sums over all data, the model's state, and what is carried.
      part: the part of ``TrainState.carried`` that it takes and gives.

    Returns:
      The same as `make_gradients`.
    """
    reduction, leaves = partition.reduction, partition.leaves

    elsewhere = partition.stores
    views = [
        P() if number in elsewhere else reduction.out_spec(leaf)
        for number, leaf in enumerate(leaves)
    ]
    out_specs = views, P(), P(), rows_spec(partition.mesh)
    run = partition.mapped(
        of_own_part(_of_own_params(body, len(leaves), apart=bool(reduction.apart))),
        out_specs,
        carried=1,
        apart=True,
    )

    def gradients(weights, model_state, inputs, key, scale, carry):
        shards, inputs = partition.local_views(weights), with_keys(inputs, key)
        own = carry.get(part, ())
        grads, *rest, own = run(shards, inputs, model_state, key, scale, own)
        pairs = enumerate(zip(leaves, grads, strict=True))
        grads = [
            pair[1] if number in elsewhere else reduction.as_gradient(*pair)
            for number, pair in pairs
        ]
        after = {part: own} if part in carry else {}
        return jax.tree.unflatten(structure, grads), *rest, after

    return gradients


def _of_own_params(
    body: Callable[..., tuple], count: int, *, apart: bool
) -> Callable[..., tuple]:
    """Take the leading dim, of one, off `count` shards, and put it on gradients."""

    def run(shards: list, *given: Any) -> tuple:
        own = [x[0] for x in shards[:count]]
        grads, *rest = body([*own, *shards[count:]], *given)
        return [grad[None] for grad in grads], *rest

    return run if apart else body


def _accumulated(
    one: Callable[..., tuple], model_state: PyTree, inputs: Inputs, accumulate: int
) -> tuple[list[jax.Array], Sums, PyTree]:
    """Add up ``one(model_state, index, rows)`` over the micro-batches."""
    if accumulate == 1:
        return one(model_state, 0, inputs)

    def add(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
        grads, sums, state = carry
        rows = microbatch_rows(inputs, index, accumulate)
        new_grads, new_sums, state = one(state, index, rows)
        grads = jax.tree.map(jnp.add, grads, new_grads)
        return (grads, merged(sums, new_sums), state), None

    first = microbatch_rows(inputs, 0, accumulate)
    grads, sums, _ = jax.eval_shape(lambda: one(model_state, 0, first))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
    start = (zeros, of_no_examples(sums), model_state)
    carry, _ = jax.lax.scan(add, start, jnp.arange(accumulate))
    return carry
