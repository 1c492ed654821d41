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

from jaxpar.sharding.collectives import Collectives, local_view, on_placed_shards
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import Reduction, Traffic, Wire
from jaxpar.types import PyTree

Leaves = Sequence[LeafSharding]

SCALE_BYTES = 4


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
      >>> QuantizedReduction(bits=4).largest
      7
    """

    bits: int = 8
    block: int = 256
    feedback: bool = True
    at_zero2: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"QuantizedReduction: bits={self.bits} must be 8 or 4.")
        if self.block < 8 or self.block % 2:
            raise ValueError(
                f"QuantizedReduction: block={self.block} must be even, and at least 8."
            )

    @property
    def largest(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

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
            blocks = -(-part // self.block)
            sent = ways * blocks * (self.block * self.bits // 8 + SCALE_BYTES)
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
        axes, ways, dim = leaf.reduced_inside, _ways(leaf), leaf.view_data_dim
        if dim is None:
            rows = jnp.pad(view.ravel(), (0, -view.size % ways)).reshape(ways, -1)
            part = rows.shape[1:]
        else:
            *before, size = view.shape[: dim + 1]
            split = view.reshape(*before, ways, size // ways, *view.shape[dim + 1 :])
            rows = jnp.moveaxis(split, dim, 0)
            part = rows.shape[1:]
            rows = rows.reshape(ways, -1)
        swap = functools.partial(
            jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
        )
        coded = self.coded(rows)
        left = rows - self.decoded(coded, rows.shape[1])
        total = self.decoded(swap(coded), rows.shape[1]).sum(0)
        if dim is not None:
            left = jnp.moveaxis(left.reshape(ways, *part), 0, dim).reshape(view.shape)
            return total.reshape(part), left
        gathered = jax.lax.all_gather(self.coded(total[None]), axes, tiled=True)
        whole = self.decoded(gathered, rows.shape[1])
        found = [x.ravel()[: view.size].reshape(view.shape) for x in (whole, left)]
        return found[0], found[1]

    def coded(self, rows: jax.Array) -> jax.Array:
        """Codes and scales of rows, ``[rows, size] -> [rows, bytes]``, uint8."""
        count, size = rows.shape
        blocks = jnp.pad(rows, ((0, 0), (0, -size % self.block)))
        blocks = blocks.reshape(count, -1, self.block)
        most = jnp.abs(blocks).max(axis=-1, keepdims=True)
        scales = jnp.where(most > 0, most, 1.0) / self.largest
        codes = jnp.round(blocks / scales).astype(jnp.int8)
        if self.bits == 4:
            positive = (codes + 8).astype(jnp.uint8)
            stored = positive[..., ::2] | (positive[..., 1::2] << 4)
        else:
            stored = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        numbers = jax.lax.bitcast_convert_type(scales[..., 0], jnp.uint8)
        return jnp.concatenate([stored, numbers], axis=-1).reshape(count, -1)

    def decoded(self, coded: jax.Array, size: int) -> jax.Array:
        """Undo `coded`, but for rounding."""
        width = self.block * self.bits // 8
        blocks = coded.reshape(len(coded), -1, width + SCALE_BYTES)
        stored, numbers = blocks[..., :width], blocks[..., width:]
        scales = jax.lax.bitcast_convert_type(numbers, jnp.float32)[..., None]
        if self.bits == 4:
            pairs = jnp.stack([stored & 15, stored >> 4], axis=-1)
            codes = pairs.reshape(*stored.shape[:-1], self.block).astype(jnp.int8) - 8
        else:
            codes = jax.lax.bitcast_convert_type(stored, jnp.int8)
        return (codes * scales).reshape(len(coded), -1)[:, :size]


def _ways(leaf: LeafSharding) -> int:
    return math.prod(leaf.sizes[axis] for axis in leaf.reduced_inside)
