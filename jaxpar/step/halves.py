"""How is a loss computed for two halves of a device's rows, side by side?

Tensor parallelism sums each half of a layer's results over devices before the next
matmul can start. Two halves of the rows don't need each other: while one is summed, the
other computes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.jaxprs.side_by_side import side_by_side
from jaxpar.step.inputs import Inputs, map_rows, num_rows
from jaxpar.step.row_draws import ShardKey
from jaxpar.step.weighted import merged


def in_halves(loss_of: Callable[..., tuple]) -> Callable[..., tuple]:
    """Call ``loss_of(leaves, model_state, shard_key, inputs)`` for halves of the rows.

    Args:
      loss_of: returns sums over rows, and the model's state, which depends on no row.
        It draws the numbers of one of twice as many data shards.

    Returns:
      A function of the same arguments and results, for an even number of rows.
    """

    def both(leaves: list, model_state: Any, key: ShardKey, inputs: Inputs) -> tuple:
        shared = leaves, model_state
        calls = [(*shared, *_half(key, inputs, number)) for number in (0, 1)]
        closed, shapes = jax.make_jaxpr(loss_of, return_shape=True)(*calls[0])
        outs = side_by_side(closed, *map(jax.tree.leaves, calls))
        structure = jax.tree.structure(shapes)
        results = [jax.tree.unflatten(structure, part) for part in outs]
        (sums, state), (others, _) = results
        return merged(sums, others), state

    return both


def _half(key: ShardKey, inputs: Inputs, number: int) -> tuple[ShardKey, Inputs]:
    """A half's rows, and its key: that of one of twice as many data shards."""
    count = num_rows(inputs) // 2
    first = number * count
    rows = map_rows(lambda x: x[first : first + count], inputs)
    return dataclasses.replace(key, shard=2 * key.shard + number), rows
