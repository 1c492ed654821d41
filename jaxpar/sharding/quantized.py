"""How are parameters gathered, and gradients reduced, in few bits?

Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for
Giant Model Training", sections 3.1 (qwZ) and 3.3 (qgZ).
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.mesh import REPLICA
from jaxpar.sharding.block_codes import BlockCodes
from jaxpar.sharding.collectives import (
    ManualCollectives,
    as_computed,
    local_view,
    on_placed_shards,
)
from jaxpar.sharding.leaf_sharding import LeafSharding


@dataclasses.dataclass(frozen=True)
class QuantizedCollectives(ManualCollectives):
    """Collectives that code what data splits; other leaves go as they are.

    Attributes:
      weights: how parameters are coded while they are gathered; None for not at all.
      gradients: how gradients are coded while they are reduced inside a replica.
    """

    weights: BlockCodes | None = None
    gradients: BlockCodes | None = None

    def gather(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """All-gather codes along the view's data dim."""
        gathered = self._gathered(leaf, shard, leaf.data_axes)
        if gathered is None:
            return super().gather(leaf, shard)
        return as_computed(leaf, gathered)

    def gather_replicas(self, leaf: LeafSharding, shard: jax.Array) -> jax.Array:
        """All-gather codes along the view's data dim."""
        axes = (REPLICA,) if leaf.over_replicas else ()
        gathered = self._gathered(leaf, shard, axes)
        return super().gather_replicas(leaf, shard) if gathered is None else gathered

    def _gathered(
        self, leaf: LeafSharding, shard: jax.Array, axes: tuple[str, ...]
    ) -> jax.Array | None:
        codes, dim = self.weights, leaf.view_data_dim
        is_float = jnp.issubdtype(shard.dtype, jnp.floating)
        if codes is None or dim is None or not axes or not is_float:
            return None

        def gather(shard: jax.Array) -> jax.Array:
            return codes.gathered(shard, dim, axes)

        return on_placed_shards(gather, leaf)(shard)

    def reduce(self, leaf: LeafSharding, whole: jax.Array) -> jax.Array:
        """All-to-all of codes; each shard adds up what it gets, in fp32."""
        codes, dim, axes = self.gradients, leaf.view_data_dim, leaf.reduced_inside
        if codes is None or dim is None or not axes:
            return super().reduce(leaf, whole)

        def reduce(view: jax.Array) -> jax.Array:
            return codes.scattered(view, dim, axes)[0]

        view = local_view(leaf, whole)
        found = on_placed_shards(reduce, leaf)(view)
        return self._as_kept(found.astype(self.communicated_dtype(view.dtype)))
