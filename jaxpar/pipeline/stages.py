"""Which blocks are on which stage: stored in order, reordered for the stages.

Each section of a model is divided among all stages, as one or several chunks of each.

The state stores blocks stacked in their order, [L, ...]. To compute, stage s needs its
chunks' blocks together: [P, v, n, ...], as [P v n, ...] sharded over pipe. With one
chunk a stage and L = P n that is the stored order, and nothing moves. Otherwise blocks
are reordered once a step, and their gradients are reordered back.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.mesh import PIPE
from jaxpar.sharding.constrain import constrain
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Stages:
    """How a section's blocks are divided among stages.

    If the virtual stages do not divide the blocks, the first ones have one more; the
    others have an idle place with a copy of a block, which is not run.

    Attributes:
      num_blocks: L of the section.
      num_stages: P.
      num_chunks: v of the section.
      name: the section's.
      first_chunk: chunks of the sections before.
    """

    num_blocks: int
    num_stages: int
    num_chunks: int
    name: str = "blocks"
    first_chunk: int = 0

    @property
    def num_virtual(self) -> int:
        """Number of virtual stages, v P."""
        return self.num_stages * self.num_chunks

    @property
    def places(self) -> int:
        """Places for blocks in a chunk, n."""
        return -(-self.num_blocks // self.num_virtual)

    @property
    def idle_places(self) -> int:
        """Places in which no block is run."""
        return self.num_virtual * self.places - self.num_blocks

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """[v P]: blocks of each virtual stage."""
        least, more = divmod(self.num_blocks, self.num_virtual)
        return least + (np.arange(self.num_virtual) < more)

    @functools.cached_property
    def firsts(self) -> np.ndarray:
        """[v P]: the first block of each virtual stage."""
        return np.cumsum(self.counts) - self.counts

    @property
    def in_order(self) -> bool:
        """Whether the stages' order is the stored order."""
        return self.idle_places == 0 and self.num_chunks == 1

    def staged(self, leaf: LeafSharding) -> LeafSharding:
        """The sharding of a stacked leaf in the stages' order, sharded over pipe."""
        if self.in_order:
            return leaf
        rest = (
            (PIPE,),
            *(tuple(a for a in axes if a != PIPE) for axes in leaf.placed[1:]),
        )
        return dataclasses.replace(
            leaf,
            shape=(self.num_virtual * self.places, *leaf.shape[1:]),
            compute=(PIPE, *leaf.compute[1:]),
            placed=rest,
        )

    def to_stages(self, leaf: LeafSharding, view: jax.Array) -> jax.Array:
        """Put the view of a stacked leaf in the stages' order."""
        if self.in_order:
            return view
        P, v, n = self.num_stages, self.num_chunks, self.places
        # Slices and transposes: XLA 0.11.2 can't partition a gather here (it aborts).
        chunks = view[: self._num_full * n].reshape(self._num_full, n, *view.shape[1:])
        if self.idle_places:
            chunks = jnp.concatenate([chunks, self._with_idle_places(view)])
        by_stage = chunks.reshape(v, P, n, *view.shape[1:]).swapaxes(0, 1)
        staged = by_stage.reshape(P * v * n, *view.shape[1:])
        # Without the constraint the compiler gathers the blocks to reorder them.
        staged = constrain(staged, None, *leaf.view_spec(data=False)[1:])
        return constrain(staged, *self.staged(leaf).view_spec(data=False))

    def from_stages(self, leaf: LeafSharding, view: jax.Array) -> jax.Array:
        """Put a view in the stages' order back in the stored order."""
        if self.in_order:
            return view
        P, v, n = self.num_stages, self.num_chunks, self.places
        view = constrain(view, None, *leaf.view_spec(data=False)[1:])
        chunks = view.reshape(P, v, n, *view.shape[1:]).swapaxes(0, 1)
        chunks = chunks.reshape(P * v, n, *view.shape[1:])
        blocks = chunks[: self._num_full].reshape(-1, *view.shape[1:])
        if not self.idle_places:
            return blocks
        others = chunks[self._num_full :, : n - 1].reshape(-1, *view.shape[1:])
        return jnp.concatenate([blocks, others])

    def chunk_of(self, blocks: Params, chunk: jax.Array) -> Params:
        """A chunk's blocks, [n, ...], from one stage's blocks, [v n, ...].

        The nearest of the section's own for a chunk of another section.
        """
        if self.num_chunks == 1:
            return blocks
        n = self.places
        # Too late a chunk reads the last one: dynamic slices are clamped.
        first = jnp.maximum(chunk - self.first_chunk, 0) * n
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, n), blocks)

    def add_chunk(self, grads: Params, made: Params, chunk: jax.Array) -> Params:
        """Add a chunk's gradients, [n, ...], to one stage's, [v n, ...]."""
        if self.num_chunks == 1:
            return jax.tree.map(jnp.add, grads, made)
        n = self.places
        first = jnp.maximum(chunk - self.first_chunk, 0) * n

        def add(grads: jax.Array, made: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_slice_in_dim(grads, first, n)
            return jax.lax.dynamic_update_slice_in_dim(grads, old + made, first, 0)

        return jax.tree.map(add, grads, made)

    def put_chunk(self, state: PyTree, made: PyTree, chunk: jax.Array) -> PyTree:
        """Replace a chunk's mutable state, [n, ...], in one stage's, [v n, ...]."""
        if self.num_chunks == 1:
            return made
        first = jnp.maximum(chunk - self.first_chunk, 0) * self.places

        def put(state: jax.Array, made: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(state, made, first, 0)

        return jax.tree.map(put, state, made)

    @property
    def _num_full(self) -> int:
        """Virtual stages without an idle place."""
        return self.num_virtual - self.idle_places

    def _with_idle_places(self, view: jax.Array) -> jax.Array:
        """The chunks that have an idle place, [idle, n, ...]."""
        n, rest = self.places, view.shape[1:]
        if n == 1:
            return jnp.broadcast_to(view[-1:], (self.idle_places, *rest))[:, None]
        others = view[self._num_full * n :].reshape(-1, n - 1, *rest)
        return jnp.concatenate([others, others[:, -1:]], axis=1)


@dataclasses.dataclass(frozen=True)
class Division:
    """How all sections are divided among stages, one after the other.

    Attributes:
      sections: of each section.
    """

    sections: tuple[Stages, ...]

    @property
    def num_stages(self) -> int:
        """P."""
        return self.sections[0].num_stages

    @property
    def num_chunks(self) -> int:
        """Chunks of a stage, of all sections."""
        return sum(section.num_chunks for section in self.sections)

    @functools.cached_property
    def section_of_chunk(self) -> np.ndarray:
        """[v]: the number of the section that a chunk is of."""
        counts = [section.num_chunks for section in self.sections]
        return np.repeat(np.arange(len(counts)), counts)

    def of(self, leaf: str) -> Stages | None:
        """The section that a leaf is stacked in; None for another part's leaf."""
        part = leaf.split("/")[0]
        return next((own for own in self.sections if own.name == part), None)


def divide(counts: Mapping[str, int], num_stages: int, num_chunks: int) -> Division:
    """Divide sections among all stages.

    Args:
      counts: section -> its blocks.
      num_stages: P.
      num_chunks: chunks of a section on each stage, fewer where it has too few blocks.

    Returns:
      The division.
    """
    sections: list[Stages] = []
    for name, count in counts.items():
        chunks = max(1, min(num_chunks, count // num_stages))
        before = sum(section.num_chunks for section in sections)
        sections.append(Stages(count, num_stages, chunks, name, before))
    return Division(tuple(sections))
