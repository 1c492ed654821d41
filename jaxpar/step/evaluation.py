"""How is a loss computed without gradients: for its check, and in evaluation?"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.sharding.exchange import PARTS, counting_means
from jaxpar.step.inputs import Inputs, microbatch_rows, with_keys
from jaxpar.step.loss import Loss, Sums, make_loss
from jaxpar.step.partition import Partition
from jaxpar.step.row_draws import AsTraced, ShardKey
from jaxpar.step.weighted import merged, of_no_examples
from jaxpar.types import Params


def make_forward(
    partition: Partition, loss: Loss, like: tuple[Params, Params], *, training: bool
) -> Callable[..., Sums]:
    """Make ``(shards, inputs, model_state, key, parts) -> Sums``, without gradients.

    For one data shard's rows, in `parts` micro-batches.
    """
    structure = jax.tree.structure(like)
    loss_of = make_loss(
        partition.network, loss, structure, partition.draws, training=training
    )

    def forward(shards, inputs, model_state, key, parts):
        prepared = partition.prepare(shards)
        leaves = partition.differentiated(shards, prepared)

        own_key = partition.shard_key(key)

        def one(key: ShardKey, rows: Inputs) -> Sums:
            given = (model_state, key, rows)
            return partition.call(loss_of, leaves, prepared, *given)[0]

        def part(index: jax.Array | int) -> Sums:
            rows = microbatch_rows(inputs, index, parts)
            return one(own_key.fold_in(index), rows)

        def add(sums: Sums, index: jax.Array) -> tuple[Sums, None]:
            return merged(sums, part(index)), None

        if parts == 1:
            return one(own_key, inputs)
        with counting_means() as means:
            like = jax.eval_shape(lambda: part(0))
        start, numbers = of_no_examples(like), jnp.arange(parts)
        if not means:
            return jax.lax.scan(add, start, numbers)[0]
        # Side by side, for a mean over the rows of all parts.
        found = jax.vmap(part, axis_name=PARTS)(numbers)
        return jax.lax.scan(lambda x, y: (merged(x, y), None), start, found)[0]

    return forward


def make_evaluation(
    partition: Partition, loss: Loss, like: tuple[Params, Params]
) -> Callable[..., Sums]:
    """Make ``(weights, model_state, inputs, key, is_left_over) -> Sums``.

    In evaluation mode. Left-over rows, fewer than there are data shards, are computed
    on every shard; their random numbers differ from those on one device.
    """

    def make_body(partition: Partition) -> Callable[..., Sums]:
        forward = make_forward(partition, loss, like, training=False)
        return functools.partial(forward, parts=1)

    return evaluation_on_shards(partition, make_body)


def evaluation_on_shards(
    partition: Partition, make_body: Callable[[Partition], Callable[..., Sums]]
) -> Callable[..., Sums]:
    """Run ``body(shards, inputs, model_state, key) -> Sums`` on every data shard."""
    # For left-over rows all shards draw the same numbers, from another key.
    same = dataclasses.replace(partition, draws=AsTraced())

    def evaluation(weights, model_state, inputs, key, is_left_over):
        used = same if is_left_over else partition
        body = make_body(used)

        def on_shard(*given: Any) -> Sums:
            sums = body(*given)
            return sums if is_left_over else sums.over_data(used.collectives)

        run = used.mapped(on_shard, out_specs=P(), whole=is_left_over)
        key = jax.random.fold_in(key, 1) if is_left_over else key
        return run(used.views(weights), with_keys(inputs, key), model_state, key)

    return evaluation
