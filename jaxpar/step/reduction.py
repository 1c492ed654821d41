"""How are the gradients of data shards reduced, and what does that carry and send?

A `Reduction` runs inside ``shard_map``, where every data shard has gradients of its own
rows. It returns their sum as it is stored; a compressed one returns nearly their sum,
and may carry what it left out to the next step (error feedback), an array a shard. An
optimizer brings one by `jaxpar.step.update.Update.reduction`; the others use
`PlainReduction`.

Source of error feedback: Seide et al. 2014, "1-Bit Stochastic Gradient Descent".
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import BATCH_AXES, entry_of
from jaxpar.sharding.collectives import Collectives, from_view, manual_spec
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import axes_of
from jaxpar.types import PyTree

Traffic = dict[str, dict[str, int]]
"""Axes, such as "data" -> kind of collective -> bytes of unsharded arrays, a step."""


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array | float:
    """What gradients of a norm are multiplied by, so that it is at most `clip_norm`."""
    if clip_norm is None:
        return 1.0
    return jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a closed form of a reduction's traffic depends on, besides the leaves.

    Attributes:
      sizes: mesh axis -> devices on it.
      itemsize: bytes of an element of a gradient that is reduced as it is.
      times: how often a step reduces every gradient; 1 except by `PlainReduction`.
    """

    sizes: Mapping[str, int]
    itemsize: int
    times: int = 1

    def over(self, axes: Iterable[str]) -> str:
        """How a budget names the axes of several devices; empty for none."""
        return " x ".join(axis for axis in axes if self.sizes[axis] > 1)


@runtime_checkable
class Reduction(Protocol):
    """How gradients are reduced over data. Only `reduce` and `communicated` are needed.

    It reduces once a step: at ZeRO 0 and 1, and in a pipeline at any stage. It is
    refused, before anything compiles, where the backward pass reduces (ZeRO 2 and 3) or
    the compiler does (coupled examples). On one data shard there is nothing to reduce,
    and `PlainReduction` runs.

    Attributes:
      saved: whether checkpoints hold what it carries.
      at_zero2: whether it runs at ZeRO 2 too, and reduces once a step there: a device
        then has its whole gradients, as at ZeRO 1.
      apart: axes whose devices have parameters and gradients of their own: both are
        stacked along a leading dim, which these split (`Update.local_params`).
      clips_itself: whether it clips gradients (`UpdateSpec.clip_norm`), and the step
        does not clip what it returns, such as a momentum.
    """

    saved: bool = True
    at_zero2: bool = False
    apart: tuple[str, ...] = ()
    clips_itself: bool = False

    def init(self, leaves: Sequence[LeafSharding]) -> PyTree:
        """Make what one data shard carries before the first step; traceable.

        Args:
          leaves: the trained leaves as a data shard sees them.

        Returns:
          A tree of arrays; by default none. One whose name ends with a leaf's is stored
          sharded over tensor and pipe: of its view's shape, as that view is; with a row
          for each of the shards that these make of it, by rows.
        """
        del leaves
        return ()

    def begin(self, leaves: Sequence[LeafSharding], opt_state: PyTree) -> PyTree:
        """What `init` makes, for a run that goes on without what it carried.

        Such as on another mesh. Traceable, on global arrays.

        Args:
          leaves: as for `init`.
          opt_state: the optimizer's state, logical.
        """
        del opt_state
        return self.init(leaves)

    def local(
        self, leaves: Sequence[LeafSharding], params: list[jax.Array], carry: PyTree
    ) -> list[jax.Array]:
        """The parameters that this data shard computes its gradients with.

        Runs inside ``shard_map``, where a step gathers parameters and reduces gradients
        once; evaluation takes the stored ones.

        Args:
          leaves: as for `reduce`.
          params: gathered, in the dtype of the computation.
          carry: as for `reduce`.
        """
        del leaves, carry
        return params

    def reduce(
        self,
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """Sum gradients over data; runs inside ``shard_map`` on every data shard.

        Args:
          leaves: the trained leaves as a data shard sees them. A gradient is summed
            over its ``reduce_axes``; where it ``is_split``, a shard of the sum is kept,
            along ``view_data_dim`` of its view, over its ``data_axes``.
          grads: this shard's gradients, fp32, of the leaves' shapes; `local_view` makes
            views of them. They add up to the step's gradient, without the loss scale.
          carry: from `init`, or from the step before.
          collectives: the plain ones.

        Returns:
          The sums, of any floating dtype, as views that data splits; and what is
          carried. A step that is skipped keeps the old one.
        """
        ...

    def between(
        self,
        leaves: Sequence[LeafSharding],
        views: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """The rest of `reduce`, where the backward pass has reduced inside replicas.

        Args:
          leaves: as for `reduce`.
          views: what ``collectives.reduce`` returned.
          carry: as for `reduce`.
          collectives: as for `reduce`.
        """
        return list(map(collectives.reduce_replicas, leaves, views)), carry

    def reduce_soundly(
        self,
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """As `reduce`, but NaN if any shard's gradients are not finite.

        Codes of a few bits may hold no NaN: a step would be applied that must not be.
        """
        sums, carry = self.reduce(leaves, grads, carry, collectives)
        finite = [jnp.all(jnp.isfinite(grad)) for grad in grads]
        wrong = collectives.total(1.0 - jnp.all(jnp.stack(finite)).astype(jnp.float32))
        return [jnp.where(wrong > 0, jnp.nan, x).astype(x.dtype) for x in sums], carry

    def at_new_params(self, carry: PyTree) -> PyTree:
        """What is carried on where other parameters take the place of those before."""
        return carry

    def norm(self, grads: PyTree) -> jax.Array:
        """The global norm of packed gradients; a scalar, traced on global arrays.

        Clipping, and whether the step is applied, depend on it alone.
        """
        return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))

    def carried_norm(self, carry: PyTree) -> jax.Array | None:
        """The norm in place of `norm`, without the loss scale, if `reduce` carries it.

        Args:
          carry: what `reduce` carried, of all data shards: dim 0.
        """
        del carry

    def communicated(self, leaves: Sequence[LeafSharding], wire: Wire) -> Traffic:
        """What `reduce` communicates a step: `Engine.verify` holds the program to it.

        Args:
          leaves: the trained leaves, or some of them.
          wire: the mesh, and the dtype of plain gradients.
        """
        ...

    def out_spec(self, leaf: LeafSharding) -> P:
        """The batch axes' part of the spec of a gradient, of what `reduce` returns.

        With `apart` that has the leading dim already.
        """
        return manual_spec(leaf.stacked(self.apart))

    def as_gradient(self, leaf: LeafSharding, reduced: jax.Array) -> jax.Array:
        """The gradient that the update gets, from what `reduce` returned; global."""
        return from_view(leaf.stacked(self.apart), reduced)

    def gradient_shape(self, leaf: LeafSharding) -> tuple[int, ...]:
        """The shape of the gradient that the update gets."""
        return leaf.stacked(self.apart).shape

    def warm_up(self) -> int:
        """Steps before it compresses."""
        return 0

    def notes(self) -> tuple[str, ...]:
        """Lines for `Engine.explain`."""
        return ()


class PlainReduction(Reduction):
    """All-reduces, and reduce-scatters of leaves that data splits.

    At ZeRO 2 and 3 the backward pass makes those inside a replica.
    """

    def reduce(
        self,
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """Over all axes, inside replicas first."""
        inside = list(map(collectives.reduce, leaves, grads))
        return self.between(leaves, inside, carry, collectives)

    def reduce_soundly(
        self,
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """As `reduce`: a sum of what is not finite is not finite."""
        return self.reduce(leaves, grads, carry, collectives)

    def communicated(self, leaves: Sequence[LeafSharding], wire: Wire) -> Traffic:
        """Every gradient inside a replica, and its shards between replicas."""
        found: Traffic = {}

        def add(axes: Iterable[str], kind: str, number: int) -> None:
            if number and (over := wire.over(axes)):
                kinds = found.setdefault(over, {})
                kinds[kind] = kinds.get(kind, 0) + number

        each = wire.itemsize
        for leaf in leaves:
            number, kind = math.prod(leaf.shape), "all-reduce"
            inside = "reduce-scatter" if leaf.is_split else kind
            piece = wire.times * each * (number // leaf.ways_placed)
            add(leaf.reduced_inside, inside, piece)
            kind = "reduce-scatter" if leaf.over_replicas and leaf.is_split else kind
            between = number // (leaf.ways_placed * leaf.data_ways)
            between = between if leaf.is_split else number // leaf.ways_placed
            add(leaf.reduced_between, kind, each * between)
        return found


PLAIN = PlainReduction()


class LocalGradients(Reduction):
    """No reduction: the update gets every data shard's gradients, and exchanges them.

    A gradient then has a leading dim, the data shards, and their sum along it is the
    step's gradient. The dim is sharded over the batch axes, the others as the leaf is
    computed on. An update derives from this class to name what it communicates.
    """

    def reduce(
        self,
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """A leading dim of one shard."""
        del leaves, collectives
        return [grad[None] for grad in grads], carry

    def norm(self, grads: PyTree) -> jax.Array:
        """A bound of the norm of the sum: its norm if all shards' gradients were equal.

        The root of the number of shards times the sum of the squares. An update that
        clips by the norm of what it exchanges overrides it.
        """
        shards = next(iter(jax.tree.leaves(grads))).shape[0]
        return math.sqrt(shards) * super().norm(grads)

    def communicated(self, leaves: Sequence[LeafSharding], wire: Wire) -> Traffic:
        """Nothing; the update's own traffic is to be named here."""
        del leaves, wire
        return {}

    def out_spec(self, leaf: LeafSharding) -> P:
        """Dim 0 is the data shards."""
        return P(_all_batch(leaf))

    def as_gradient(self, leaf: LeafSharding, reduced: jax.Array) -> jax.Array:
        """As it is."""
        del leaf
        return reduced

    def gradient_shape(self, leaf: LeafSharding) -> tuple[int, ...]:
        """With the data shards as dim 0."""
        shards = math.prod(leaf.sizes[axis] for axis in axes_of(_all_batch(leaf)))
        return (shards, *leaf.shape)


def _all_batch(leaf: LeafSharding) -> Any:
    """The entry of a dim that all batch axes of the mesh split."""
    return entry_of([axis for axis in BATCH_AXES if axis in leaf.sizes])
