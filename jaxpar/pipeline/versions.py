"""Which parameters does a piece of work use, and where are its results added up?

A synchronous step has one version of the parameters and one sum. In a step of an
asynchronous schedule several batches are under way: each has sums of its own, and two
versions of the parameters are there.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.pipeline.sections import Sections
from jaxpar.step.loss import Sums
from jaxpar.step.weighted import Max, is_reduced, merged
from jaxpar.types import Params, PyTree


class OneBatch:
    """A step of one batch, with one version of the parameters."""

    def forward(self, params: tuple[PyTree, ...], index: jax.Array) -> PyTree:
        """The parameters of a micro-batch's forward.

        Args:
          params: the newest, and what else there is.
          index: the micro-batch.
        """
        del index
        return params[0]

    def backward(self, params: tuple[PyTree, ...], index: jax.Array) -> PyTree:
        """The parameters of its backward."""
        return self.forward(params, index)

    def num_weights(self, accumulate: int) -> int:
        """Micro-batches whose loss's weight is kept, of `accumulate` a batch."""
        return accumulate

    def zeros(self, like: PyTree, axis: int = 0) -> PyTree:
        """Empty sums of gradients, fp32; where there are several, along `axis`."""
        del axis
        return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.float32), like)

    def added(self, sums: PyTree, made: PyTree, index: jax.Array) -> PyTree:
        """Sums with a micro-batch's gradients of embedding or head added."""
        del index
        return jax.tree.map(jnp.add, sums, made)

    def added_chunk(
        self,
        sections: Sections,
        sums: Params,
        made: Params,
        chunk: jax.Array,
        index: jax.Array,
    ) -> Params:
        """A stage's sums with a micro-batch's gradients of a chunk added."""
        del index
        return sections.add_chunk(sums, made, chunk)

    def no_losses(self, sums: Sums) -> Sums:
        """The losses of no micro-batch."""
        return sums

    def merged(self, sums: Sums, made: Sums, index: jax.Array) -> Sums:
        """Losses and metrics with those of a micro-batch."""
        del index
        return merged(sums, made)


@dataclasses.dataclass(frozen=True)
class SeveralBatches(OneBatch):
    """Batches under way, each with sums of its own: dim 0 of sums, dim 1 of a stage's.

    Attributes:
      accumulate: micro-batches of each, M.
      batches: how many.
      with_gradients: the first ones that may have gradients; the later have none yet.
    """

    accumulate: int
    batches: int
    with_gradients: int

    def num_weights(self, accumulate: int) -> int:
        """See `OneBatch`."""
        return accumulate * self.batches

    def zeros(self, like: PyTree, axis: int = 0) -> PyTree:
        """See `OneBatch`."""

        def wide(x: jax.Array) -> jax.Array:
            shape = list(x.shape)
            shape.insert(axis, self.with_gradients)
            return jnp.zeros(shape, jnp.float32)

        return jax.tree.map(wide, like)

    def added(self, sums: PyTree, made: PyTree, index: jax.Array) -> PyTree:
        """See `OneBatch`."""
        number = self._batch(index)
        return jax.tree.map(lambda all, own: all.at[number].add(own), sums, made)

    def added_chunk(
        self,
        sections: Sections,
        sums: Params,
        made: Params,
        chunk: jax.Array,
        index: jax.Array,
    ) -> Params:
        """See `OneBatch`; a stage has one chunk."""
        del sections, chunk
        number = self._batch(index)
        return jax.tree.map(lambda all, own: all.at[:, number].add(own), sums, made)

    def no_losses(self, sums: Sums) -> Sums:
        """See `OneBatch`."""

        def wide(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (self.with_gradients, *x.shape))

        return jax.tree.map(wide, sums)

    def merged(self, sums: Sums, made: Sums, index: jax.Array) -> Sums:
        """See `OneBatch`."""
        number = self._batch(index)

        def merge(all: PyTree, own: PyTree) -> PyTree:
            is_max = isinstance(own, Max)

            def put(all: jax.Array, own: jax.Array) -> jax.Array:
                at = all.at[number]
                return at.max(own) if is_max else at.add(own)

            return jax.tree.map(put, all, own)

        return jax.tree.map(merge, sums, made, is_leaf=is_reduced)

    def _batch(self, index: jax.Array) -> jax.Array:
        """Its number; that of an idle slot, which adds nothing, is 0."""
        return jnp.maximum(index, 0) // self.accumulate


@dataclasses.dataclass(frozen=True)
class Stashed(SeveralBatches):
    """The oldest batch uses the second version, of the step before; the others the
    newest."""

    def forward(self, params: tuple[PyTree, ...], index: jax.Array) -> PyTree:
        """See `OneBatch`."""
        newest, stashed = params
        is_old = index < self.accumulate
        return jax.tree.map(
            lambda old, new: jnp.where(is_old, old, new), stashed, newest
        )


@dataclasses.dataclass(frozen=True)
class Corrected(SeveralBatches):
    """Forwards use the newest version, backwards the second: corrected."""

    def backward(self, params: tuple[PyTree, ...], index: jax.Array) -> PyTree:
        """See `OneBatch`."""
        del index
        return params[1]
