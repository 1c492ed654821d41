"""What is a parameter while it is not gathered, and how do its shards become it?

Where it is used is found in `jaxpar.step.gather_at_use`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.sharding.collectives import Collectives
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.memory_kinds import beside, to_device
from jaxpar.step.layer_store import LayerStore


@dataclasses.dataclass(frozen=True)
class Gathering:
    """How leaves are gathered.

    Attributes:
      collectives: gather a leaf, and reduce its gradient.
      ahead: whether a loop gathers the next layer while it computes one.
      keep: whether gathered leaves are residuals: the backward pass then does not
        gather them again.
      over_replicas: whether gradients are summed over replicas where they are reduced.
      is_done: whether the leaves have been gathered; their gradients are reduced.
    """

    collectives: Collectives
    ahead: bool = False
    keep: bool = False
    over_replicas: bool = False
    is_done: bool = False


class GatheredAtUse:
    """A parameter that is gathered when it is first used.

    Args:
      leaf: its sharding.
      slot: the array to differentiate with respect to: has the shape of the stored view
        and the dtype of the reduction. Its values are not read. None for a leaf that
        is not trained.
      source: the stored fp32 view, or the leaf already gathered.
      dtype: the compute dtype.
      gathering: how it is gathered.
      store: where its layers are, if it is in no array. `source` has their numbers
        then, and the gradient of `slot` is the sum of squares of each layer's.
    """

    def __init__(
        self,
        leaf: LeafSharding,
        slot: jax.Array | None,
        source: jax.Array,
        dtype: jnp.dtype,
        gathering: Gathering,
        store: LayerStore | None = None,
    ):
        self.leaf_sharding, self.slot, self.source = leaf, slot, source
        self.dtype, self.gathering, self.store = dtype, gathering, store
        self._made: jax.Array | None = None

    @property
    def arrays(self) -> tuple[jax.Array | None, jax.Array]:
        """The arrays to pass through a transformation."""
        return self.slot, self.source

    def rebuilt(
        self, arrays: tuple[jax.Array | None, jax.Array], leaf: LeafSharding
    ) -> "GatheredAtUse":
        """The same leaf (or a slice of it) with other tracers."""
        slot, source = arrays
        given = leaf, slot, source, self.dtype, self.gathering, self.store
        return GatheredAtUse(*given)

    def without_leading_dim(self) -> "GatheredAtUse | None":
        """One slice along dim 0, its arrays the stacks; None if dim 0 is sharded."""
        leaf = self.leaf_sharding.without_leading_dim()
        return None if leaf is None else self.rebuilt(self.arrays, leaf)

    def make(self) -> jax.Array:
        """The gathered leaf in the compute dtype; gathered once."""
        if self._made is None:
            self._made = self._use()(*self.arrays)
        return self._made

    def gathered(self, source: jax.Array) -> jax.Array:
        """The leaf, from its shard."""
        if self.gathering.is_done:
            return source
        shard = to_device(source) if self.store is None else self._read(source)
        shard = shard.astype(self.dtype)
        return self.gathering.collectives.gather(self.leaf_sharding, shard)

    def _read(self, number: jax.Array) -> jax.Array:
        """A layer that is in no array."""
        leaf, store = self.leaf_sharding, self.store
        assert store is not None
        if number.ndim:
            raise ValueError(
                f"offload: params='disk': {leaf.name} is read whole by this function, "
                "but its layers are on disk, for loops; use params='host' or None."
            )

        def read(position: jax.Array, number: jax.Array) -> jax.Array:
            return store.read(position, number, leaf.view_shard_shape)

        on_devices = self.gathering.collectives.on_devices
        return on_devices(read, leaf, as_view=True)(number)

    def reduced(
        self, cotangent: jax.Array, number: jax.Array | None = None
    ) -> jax.Array:
        """The gradient of the slot, from that of the leaf; in the slot's memory.

        Args:
          cotangent: of the leaf.
          number: of the layer that the leaf is.
        """
        how, leaf, slot = self.gathering, self.leaf_sharding, self.slot
        assert slot is not None, "of a leaf that is trained"
        view = how.collectives.reduce(leaf, cotangent)
        if how.over_replicas or self.store is not None:
            view = how.collectives.reduce_replicas(leaf, view)
        if self.store is None:
            return beside(view.astype(slot.dtype), slot)
        write = how.collectives.on_devices(self.store.write, leaf, as_view=False)
        return jnp.sum(jnp.square(view.astype(jnp.float32))) + write(number, view)

    def _use(self) -> Callable[[jax.Array | None, jax.Array], jax.Array]:
        """``use(slot, source) -> leaf``; its backward pass reduces into the slot."""

        def make(_: jax.Array | None, source: jax.Array) -> jax.Array:
            return self.gathered(source)

        if self.slot is None:
            return make

        def forward(slot: jax.Array, source: jax.Array) -> tuple[jax.Array, None]:
            return make(slot, source), None

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, None]:
            return self.reduced(cotangent), None

        use = jax.custom_vjp(make)
        use.defvjp(forward, backward)
        return use
