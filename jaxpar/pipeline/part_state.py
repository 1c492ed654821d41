"""Where is the mutable state of a model's parts while a schedule runs?

A stage holds the state of its own blocks, beside their parameters and in the same
order. A part between two sections runs on the first stage alone, so every stage holds
its state, and that of the first stage counts. The train state has it as one device has:
of a section [L, ...], in order, on every device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.mesh import PIPE
from jaxpar.pipeline.buffers import over_pipe
from jaxpar.pipeline.stages import Division, Stages
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.types import PyTree

Names = tuple[tuple[str, ...], tuple[str, ...]]
"""Of the sections, and of the parts between them."""


def staged_state(division: Division, state: PyTree) -> PyTree:
    """Put the state of sections in the stages' order, [P v n, ...]."""
    return _by_section(division, state, Stages.to_stages)


def stored_state(division: Division, state: PyTree) -> PyTree:
    """Undo `staged_state`."""
    return _by_section(division, state, Stages.from_stages)


def _by_section(
    division: Division, state: PyTree, move: Callable[..., jax.Array]
) -> PyTree:
    def moved(name: str, leaf: jax.Array) -> jax.Array:
        stages = division.of(name)
        if stages is None:
            return leaf
        # As a parameter that no other axis splits, and that is replicated in storage.
        shape = (stages.num_blocks, *leaf.shape[1:])
        compute = (PIPE if stages.in_order else None, *(None for _ in shape[1:]))
        placed: tuple[tuple[str, ...], ...] = ((),) * len(shape)
        own = LeafSharding(name, shape, compute, None, placed, {}, "")
        return move(stages, own, leaf)

    leaves = [moved(name, leaf) for name, leaf in tree.named_leaves(state).items()]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def on_each_stage(state: PyTree, names: Names, num_stages: int) -> dict[str, Any]:
    """The state as stages hold it: [P, v n, ...] of sections, [P, ...] between them."""
    sections, between = names

    def split(x: jax.Array) -> jax.Array:
        return over_pipe(x.reshape(num_stages, len(x) // num_stages, *x.shape[1:]))

    def copied(x: jax.Array) -> jax.Array:
        return over_pipe(jnp.broadcast_to(x, (num_stages, *x.shape)))

    return {
        part: jax.tree.map(split if part in sections else copied, own)
        for part, own in state.items()
        if part in (*sections, *between)
    }


def of_all_stages(
    state: PyTree, names: Names, num_stages: int, first_of: Callable[[PyTree], PyTree]
) -> dict[str, Any]:
    """Undo `on_each_stage`; `first_of` takes the first stage's."""
    sections, _ = names

    def joined(x: jax.Array) -> jax.Array:
        return x.reshape(num_stages * x.shape[1], *x.shape[2:])

    return {
        part: jax.tree.map(joined, own) if part in sections else first_of(own)
        for part, own in state.items()
    }
