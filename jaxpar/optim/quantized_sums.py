"""How are gradients reduced in few bits in two hops, at every ZeRO stage?

Inside a replica the collectives code them, in the backward pass where a stage reduces
there. Between replicas it is done once a step, of shards; what coding leaves out there
is kept, and added to the next step's (LoCo).

Sources: see `jaxpar.sharding.zero_plus_plus.ZeroPlusPlus`.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.mesh import REPLICA
from jaxpar.sharding.block_codes import BlockCodes
from jaxpar.sharding.collectives import Collectives, on_placed_shards
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero_plus_plus import (
    ZeroPlusPlus as ZeroPlusPlus,  # Public, in jaxpar.optim.
)
from jaxpar.step.reduction import PLAIN, PlainReduction, Traffic, Wire
from jaxpar.types import PyTree

Leaves = Sequence[LeafSharding]


@dataclasses.dataclass(frozen=True)
class QuantizedSums(PlainReduction):
    """Sums of coded gradients, for collectives that code them inside a replica.

    Attributes:
      codes: how they are coded between replicas.
      inside: how the collectives code them inside a replica.
      error_decay: see `jaxpar.sharding.zero_plus_plus.ZeroPlusPlus`.
      reset_every: likewise.
    """

    codes: BlockCodes
    inside: BlockCodes
    error_decay: float
    reset_every: int

    def init(self, leaves: Leaves) -> PyTree:
        """See `Reduction`: what each shard has left out between replicas."""
        between = [leaf for leaf in leaves if _is_coded_between(leaf)]
        if not between:
            return ()
        errors = {leaf.name: jnp.zeros(leaf.shard_view_shape) for leaf in between}
        return {"count": jnp.int32(0), "errors": errors}

    def between(
        self,
        leaves: Leaves,
        views: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """See `Reduction`."""
        if not carry:
            return super().between(leaves, views, carry, collectives)
        count, sums, errors = carry["count"] + 1, [], {}
        keeps = count % self.reset_every != 0
        for leaf, view in zip(leaves, views, strict=True):
            if not _is_coded_between(leaf):
                sums.append(collectives.reduce_replicas(leaf, view))
                continue
            error = carry["errors"][leaf.name]
            given = view.astype(jnp.float32) + error
            total, left = on_placed_shards(
                lambda x, leaf=leaf: self._sum(leaf, x), leaf
            )(given)
            kept = self.error_decay * error + (1 - self.error_decay) * left
            errors[leaf.name] = jnp.where(keeps, kept, 0.0)
            sums.append(total)
        return sums, {"count": count, "errors": errors}

    def _sum(self, leaf: LeafSharding, view: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Over replicas: the sum, or a replica's part of it; and what is left out."""
        if not leaf.over_replicas:
            return self.codes.summed(view, (REPLICA,))
        dim = leaf.view_data_dim
        assert dim is not None, "of a leaf that is split"
        return self.codes.scattered(view, dim, (REPLICA,))

    def communicated(self, leaves: Leaves, wire: Wire) -> Traffic:
        """See `Reduction`: codes and scales of what data splits."""
        found = PLAIN.communicated([x for x in leaves if not x.is_split], wire)

        def add(axes: Sequence[str], kind: str, number: int) -> None:
            if number and (over := wire.over(axes)):
                kinds = found.setdefault(over, {})
                kinds[kind] = kinds.get(kind, 0) + number

        for leaf in leaves:
            if not leaf.is_split:
                continue
            ways, replicas = leaf.data_ways, wire.sizes.get(REPLICA, 1)
            shard = math.prod(leaf.shape) // leaf.ways_placed // ways
            inside = ways * self.inside.num_bytes(shard)
            add(leaf.reduced_inside, "all-to-all", wire.times * inside)
            sent = replicas * self.codes.num_bytes(-(-shard // replicas))
            add(leaf.reduced_between, "all-to-all", sent)
            add(leaf.reduced_between, "all-gather", 0 if leaf.over_replicas else sent)
        return found

    def notes(self) -> tuple[str, ...]:
        """See `Reduction`."""
        return (
            f"data: gradients are sent in {self.inside.bits} bits inside a replica, "
            f"and {self.codes.bits} between, {self.codes.block} elements a scale; what "
            "rounding leaves out between replicas is kept.",
        )


def _is_coded_between(leaf: LeafSharding) -> bool:
    return leaf.is_split and REPLICA in leaf.reduced_between
