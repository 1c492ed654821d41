"""How do stages buffer and exchange arrays: buffers, sends, sums.

Values of every stage are arrays [P, ...], sharded over pipe. `on_stages` runs a
function with the pipe axis manual, on each stage's shard.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import PIPE
from jaxpar.pipeline.schedules.table import IDLE
from jaxpar.sharding.collectives import wire_dtype
from jaxpar.sharding.constrain import constrain
from jaxpar.types import PyTree

UNUSED = 0.0
"""The value of idle slots and empty buffers; no result depends on it."""


def on_stages(body: Callable[..., tuple]) -> Callable[..., tuple]:
    """Run ``body(own, stacks, shared) -> (own, stacks)`` on every stage's shards.

    `body` gets `own`, [P, ...], without its leading dim, and the stage's v n layers of
    `stacks`, [P v n, ...]; `shared` is the same on every stage.
    """

    def run(own: PyTree, stacks: PyTree, shared: PyTree) -> tuple:
        own, stacks = body(jax.tree.map(lambda x: x[0], own), stacks, shared)
        return jax.tree.map(lambda x: x[None], own), stacks

    return jax.shard_map(
        run,
        in_specs=(P(PIPE), P(PIPE), P()),
        out_specs=(P(PIPE), P(PIPE)),
        axis_names={PIPE},
        check_vma=False,
    )


def from_stage(values: PyTree, stage: int, *, platform: str) -> PyTree:
    """Broadcast one stage's value of [P, ...], by an all-reduce over pipe."""

    def pick(values: PyTree, numbers: jax.Array) -> PyTree:
        mine = numbers[0] == stage

        def sum_up(x: jax.Array) -> jax.Array:
            own = jnp.where(mine, x[0], jnp.zeros_like(x[0]))
            sent = own.astype(wire_dtype(x.dtype, platform))
            return jax.lax.psum(sent, PIPE).astype(x.dtype)

        return jax.tree.map(sum_up, values)

    num_stages = jax.tree.leaves(values)[0].shape[0]
    return jax.shard_map(
        pick,
        in_specs=(P(PIPE), P(PIPE)),
        out_specs=P(),
        axis_names={PIPE},
        check_vma=False,
    )(values, jnp.arange(num_stages))


def arrived(
    pairs: Sequence[tuple[int, int]], buffer: PyTree, sent: PyTree, place: jax.Array
) -> PyTree:
    """Send between stages, and put the received values into a buffer."""
    arrived = jax.tree.map(lambda x: jax.lax.ppermute(x, PIPE, pairs), sent)
    return put(buffer, arrived, place)


def put(buffer: PyTree, value: PyTree, place: jax.Array) -> PyTree:
    """Write to a place in a buffer; nothing if it is `IDLE`."""
    index = jnp.maximum(place, 0)

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        kept = jnp.where(place == IDLE, buffer[index], value)
        return jax.lax.dynamic_update_index_in_dim(buffer, kept, index, 0)

    return jax.tree.map(put, buffer, value)


def take(buffer: PyTree, place: jax.Array) -> PyTree:
    """Read a place in a buffer; an arbitrary one if it is `IDLE`."""
    index = jnp.maximum(place, 0)
    return jax.tree.map(lambda x: x[index], buffer)


def take_before(
    buffer: PyTree, places: Sequence[jax.Array], value: PyTree
) -> tuple[list[PyTree], PyTree]:
    """Read places in a buffer before `value` is written to it.

    XLA copies a buffer, every tick, if a read may follow a write.

    Returns:
      The values read; and `value`, ordered after the reads.
    """
    there = [take(buffer, place) for place in places]
    return jax.lax.optimization_barrier((there, value))


def over_pipe(x: jax.Array) -> jax.Array:
    """Shard [P, ...] over pipe."""
    return constrain(x, PIPE)


def unused_like(shapes: PyTree) -> PyTree:
    """The result of an idle slot."""
    return jax.tree.map(lambda x: jnp.full(x.shape, UNUSED, x.dtype), shapes)
