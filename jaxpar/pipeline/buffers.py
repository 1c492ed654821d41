"""How do stages hold pieces, and exchange them: rings of places, sends, sums.

What differs by stage is an array [P, ...] over pipe. `on_stages` runs a function with
the pipe axis manual, on each stage's piece.
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
"""What idle slots give and rings begin with; no result depends on it."""


def on_stages(body: Callable[..., tuple]) -> Callable[..., tuple]:
    """Run ``body(own, stacks, shared) -> (own, stacks)`` on every stage, on its pieces.

    The pieces of `own`, [P, ...], lose their leading dim for it, and get it back; those
    of `stacks`, [P v n, ...], are v n long; `shared` is the same on every stage.
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
    """One stage's piece of [P, ...], on every stage: an all-reduce over pipe."""

    def pick(values: PyTree, numbers: jax.Array) -> PyTree:
        mine = numbers[0] == stage

        def sum_up(x: jax.Array) -> jax.Array:
            own = jnp.where(mine, x[0], jnp.zeros_like(x[0]))
            crossing = own.astype(wire_dtype(x.dtype, platform))
            return jax.lax.psum(crossing, PIPE).astype(x.dtype)

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
    """Send from stage to stage, and put what arrives into a ring."""
    arrived = jax.tree.map(lambda x: jax.lax.ppermute(x, PIPE, pairs), sent)
    return put(buffer, arrived, place)


def put(buffer: PyTree, value: PyTree, place: jax.Array) -> PyTree:
    """Write into a place of a ring; nothing where it is `IDLE`."""
    index = jnp.maximum(place, 0)

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        kept = jnp.where(place == IDLE, buffer[index], value)
        return jax.lax.dynamic_update_index_in_dim(buffer, kept, index, 0)

    return jax.tree.map(put, buffer, value)


def take(buffer: PyTree, place: jax.Array) -> PyTree:
    """Read a place of a ring; any where it is `IDLE`."""
    index = jnp.maximum(place, 0)
    return jax.tree.map(lambda x: x[index], buffer)


def take_before(
    buffer: PyTree, places: Sequence[jax.Array], value: PyTree
) -> tuple[list[PyTree], PyTree]:
    """Read places of a ring before `value` is put into it.

    XLA copies a ring, every tick, that is read after it was written or might be.

    Returns:
      What is there; and the value, which waits for it.
    """
    there = [take(buffer, place) for place in places]
    return jax.lax.optimization_barrier((there, value))


def over_pipe(x: jax.Array) -> jax.Array:
    """Lay [P, ...] out over pipe."""
    return constrain(x, PIPE)


def unused_like(shapes: PyTree) -> PyTree:
    """What an idle slot gives."""
    return jax.tree.map(lambda x: jnp.full(x.shape, UNUSED, x.dtype), shapes)
