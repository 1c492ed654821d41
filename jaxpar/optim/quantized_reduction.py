"""How are gradients exchanged in 8 or 4 bits an element, in blocks with a scale each?

Every data shard sends the others their part of its gradients, quantised, in one
all-to-all; each adds up what it gets in fp32, so that no sum is of quantised numbers. A
leaf that data does not split is gathered from these parts, quantised once more. What
the first rounding leaves out of a gradient may be added to the next one (error
feedback); the second one's is lost.

Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for
Giant Model Training", section 3.3 (qgZ); here in one hop.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.sharding.block_codes import BlockCodes
from jaxpar.sharding.collectives import Collectives, local_view, on_placed_shards
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import Reduction, Traffic, Wire
from jaxpar.types import PyTree

Leaves = Sequence[LeafSharding]


@dataclasses.dataclass(frozen=True)
class QuantizedReduction(Reduction):
    """Gradients in blocks of few bits, for `WithReduction`.

    Attributes:
      bits: of an element: 8 or 4.
      block: elements that share a scale, the largest of them over the largest code;
        the last block of a part is padded.
      feedback: whether each data shard adds what it left out to its next gradient: 4
        bytes a parameter.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> QuantizedReduction(bits=4).codes.largest
      7
    """

    bits: int = 8
    block: int = 256
    feedback: bool = True
    at_zero2: bool = True

    def __post_init__(self) -> None:
        _ = self.codes  # Which checks the numbers.

    @property
    def codes(self) -> BlockCodes:
        """How elements are coded."""
        return BlockCodes(self.bits, self.block)

    def init(self, leaves: Leaves) -> PyTree:
        """See `Reduction`: what each shard has left out."""
        if not self.feedback:
            return ()
        return {leaf.name: jnp.zeros(leaf.view_shape, jnp.float32) for leaf in leaves}

    def reduce(
        self,
        leaves: Leaves,
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """See `Reduction`."""
        sums, errors = [], {}
        for leaf, grad in zip(leaves, grads, strict=True):
            view = local_view(leaf, grad)
            if self.feedback:
                view = view + carry[leaf.name]
            exchange = functools.partial(self._exchange, leaf)
            total, errors[leaf.name] = on_placed_shards(exchange, leaf)(view)
            sums.append(collectives.reduce_replicas(leaf, total))
        return sums, errors if self.feedback else ()

    def communicated(self, leaves: Leaves, wire: Wire) -> Traffic:
        """See `Reduction`: codes and scales; between replicas, shards as they are."""
        found: Traffic = {}

        def add(over: str, kind: str, number: int) -> None:
            if over and number:
                kinds = found.setdefault(over, {})
                kinds[kind] = kinds.get(kind, 0) + number

        for leaf in leaves:
            ways, number = _ways(leaf), math.prod(leaf.shape)
            part = -(-(number // leaf.ways_placed) // ways)
            sent = ways * self.codes.num_bytes(part)
            over = wire.over(leaf.reduced_inside)
            add(over, "all-to-all", sent)
            add(over, "all-gather", 0 if leaf.is_split else sent)
            between = wire.itemsize * (number // leaf.ways_stored)
            add(wire.over(leaf.reduced_between), "all-reduce", between)
        return found

    def notes(self) -> tuple[str, ...]:
        """See `Reduction`."""
        left = "kept for the next step" if self.feedback else "lost"
        return (
            f"data: gradients are sent in {self.bits} bits, {self.block} elements a "
            f"scale; what rounding leaves out is {left}.",
        )

    def _exchange(
        self, leaf: LeafSharding, view: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """This shard of the sum, or all of a leaf that stays whole; and the error."""
        axes, dim = leaf.reduced_inside, leaf.view_data_dim
        if dim is None:
            return self.codes.summed(view, axes)
        return self.codes.scattered(view, dim, axes)


def _ways(leaf: LeafSharding) -> int:
    return math.prod(leaf.sizes[axis] for axis in leaf.reduced_inside)
