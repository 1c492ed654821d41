"""Gradients that data shards exchange in int8, with error feedback.

A reduction that is not in the package, as a user would write one. What rounding leaves
out of a step's gradient is added to the next one's.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.optim import Reduction, Wire
from jaxpar.sharding.collectives import local_view, on_placed_shards


class Int8Reduction(Reduction):
    """All-to-all of int8, summed in fp32; leaves that stay whole are gathered again."""

    def init(self, leaves: Any) -> Any:
        return {leaf.name: jnp.zeros(leaf.view_shape, jnp.float32) for leaf in leaves}

    def reduce(self, leaves: Any, grads: Any, carry: Any, collectives: Any) -> Any:
        sums, errors = [], {}
        for leaf, grad in zip(leaves, grads, strict=True):
            run = on_placed_shards(functools.partial(exchange, leaf), leaf)
            view = local_view(leaf, grad) + carry[leaf.name]
            total, errors[leaf.name] = run(view)
            sums.append(collectives.reduce_replicas(leaf, total))
        return sums, errors

    def notes(self) -> tuple[str, ...]:
        return ("data: gradients are sent in int8.",)

    def communicated(self, leaves: Any, wire: Wire) -> Any:
        found: dict[str, dict[str, int]] = {}
        for leaf in leaves:
            over, ways = wire.over(leaf.reduced_inside), ways_of(leaf)
            number = math.prod(leaf.shape) // leaf.ways_placed
            codes = -(-number // ways) * ways + 4 * ways  # And a scale for each.
            kinds = found.setdefault(over, {})
            sent = ("all-to-all",) if leaf.is_split else ("all-to-all", "all-gather")
            for kind in sent:
                kinds[kind] = kinds.get(kind, 0) + codes
        return found


def ways_of(leaf: Any) -> int:
    return math.prod(leaf.sizes[axis] for axis in leaf.reduced_inside)


def exchange(leaf: Any, view: jax.Array) -> tuple[jax.Array, jax.Array]:
    """This shard of the sum, or all of a leaf that stays whole; and the error."""
    axes, ways, dim = leaf.reduced_inside, ways_of(leaf), leaf.view_data_dim
    if dim is None:
        rows = jnp.pad(view.ravel(), (0, -view.size % ways)).reshape(ways, -1)
    else:
        *before, size = view.shape[: dim + 1]
        split = view.reshape(*before, ways, size // ways, *view.shape[dim + 1 :])
        rows = jnp.moveaxis(split, dim, 0)
    swap = functools.partial(
        jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
    )
    codes, scales = quantized(rows)
    left = rows - codes * scales
    total = (swap(codes) * swap(scales)).sum(0)
    if dim is not None:
        return total, jnp.moveaxis(left, 0, dim).reshape(view.shape)
    pieces = (jax.lax.all_gather(x, axes) for x in quantized(total[None]))
    whole = functools.reduce(jnp.multiply, pieces).ravel()[: view.size]
    return whole.reshape(view.shape), left.ravel()[: view.size].reshape(view.shape)


def quantized(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes, and a scale for each row."""
    largest = jnp.abs(rows).max(axis=tuple(range(1, rows.ndim)), keepdims=True)
    scales = jnp.where(largest > 0, largest, 1.0) / 127
    return jnp.round(rows / scales).astype(jnp.int8), scales
