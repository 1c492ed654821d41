"""How is a loss function of unsharded parameters run on their shards?"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import DATA, batch_axes, num_batch_shards, rows_spec
from jaxpar.model.bridge import Network
from jaxpar.sharding.collectives import (
    AutomaticCollectives,
    Collectives,
    ManualCollectives,
    manual_spec,
    to_view,
)
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.memory_kinds import to_host
from jaxpar.sharding.quantized import QuantizedCollectives
from jaxpar.sharding.torus import torus_dims
from jaxpar.sharding.zero import ZeroStage
from jaxpar.step.gather_at_use import call_choosing_layers, call_gathering_at_use
from jaxpar.step.gathered_leaf import GatheredAtUse, Gathering
from jaxpar.step.inputs import Inputs, specs_of
from jaxpar.step.layer_store import LayerStore
from jaxpar.step.precision import Precision, frozen_dtype
from jaxpar.step.reduction import PLAIN, Reduction
from jaxpar.step.row_draws import Draws, ShardKey
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a loss function of unsharded parameters is run on their shards.

    Attributes:
      network: the model.
      leaves: the trained leaves' shardings, in flattening order.
      frozen: those of the other parameters.
      zero: the row of the ZeRO table.
      precision: the dtypes.
      mesh: the mesh.
      coupled: whether the loss couples examples, so that it needs full micro-batches.
      draws: how the loss function's random numbers are drawn.
      reduction: how gradients are reduced over data.
      chooses: whether a loop over layers leaves some out.
      prefetch: whether a loop over layers gathers the next layer while one computes.
      replicas_at_once: whether gradients are summed over replicas where they are
        reduced, in the backward pass; for steps of one micro-batch.
      halves: whether halves of a device's rows are computed side by side.
      to_host: numbers of the trained leaves whose gradients go to the host's memory as
        they are reduced; for steps of one micro-batch.
      stores: by number of a trained leaf that is in no array, where its layers are.
    """

    network: Network
    leaves: tuple[LeafSharding, ...]
    frozen: tuple[LeafSharding, ...]
    zero: ZeroStage
    precision: Precision
    mesh: Mesh
    coupled: bool
    draws: Draws
    reduction: Reduction = PLAIN
    chooses: bool = False
    prefetch: bool = False
    replicas_at_once: bool = False
    halves: bool = False
    to_host: tuple[int, ...] = ()
    stores: Mapping[int, LayerStore] = dataclasses.field(default_factory=dict)

    @property
    def automatic(self) -> bool:
        """Whether data stays automatic, and the loss sees full micro-batches.

        XLA rejects reductions over a manual axis of one device (jax 0.11.2).
        """
        return self.coupled or num_batch_shards(self.mesh) == 1

    @property
    def collectives(self) -> Collectives:
        """The collectives over data."""
        if self.automatic:
            return AutomaticCollectives()
        sizes, own = self.mesh.shape, self.precision
        axes = tuple(axis for axis in batch_axes(self.mesh) if sizes[axis] > 1)
        torus = torus_dims(self.mesh, DATA)
        given = axes, own.reduce_dtype, self.platform, torus
        codes = self.zero.weights, self.zero.gradients
        if codes == (None, None):
            return ManualCollectives(*given)
        return QuantizedCollectives(*given, *codes)

    @functools.cached_property
    def on_shard(self) -> tuple[LeafSharding, ...]:
        """The trained leaves as the loss function's shard of the rows sees them."""
        return self._on_shard(self.leaves)

    @property
    def all_leaves(self) -> tuple[LeafSharding, ...]:
        """The trained leaves, and the others."""
        return *self.leaves, *self.frozen

    @functools.cached_property
    def all_on_shard(self) -> tuple[LeafSharding, ...]:
        """The trained leaves, and the others."""
        return self._on_shard(self.all_leaves)

    def _on_shard(self, leaves: tuple[LeafSharding, ...]) -> tuple[LeafSharding, ...]:
        if self.automatic:
            return leaves
        apart = self.reduction.apart
        return tuple(leaf.on_shard.not_reduced_over(apart) for leaf in leaves)

    @property
    def platform(self) -> str:
        """The mesh's platform."""
        return self.mesh.devices.flat[0].platform

    def shard_key(self, key: jax.Array) -> ShardKey:
        """A key that all shards share, with this shard's number."""
        return ShardKey(key, self.collectives.shard_number())

    def views(self, weights: tuple[Params, Params]) -> list[jax.Array]:
        """The stored parameters as views: those that are trained, and the others."""
        return self._views(self.all_leaves, weights)

    def local_views(self, weights: tuple[Params, Params]) -> list[jax.Array]:
        """The parameters that steps train, as views: see `Reduction.apart`."""
        return self._views(self._apart_leaves, weights)

    @property
    def _apart_leaves(self) -> tuple[LeafSharding, ...]:
        own = (leaf.stacked(self.reduction.apart) for leaf in self.leaves)
        return *own, *self.frozen

    def _views(
        self, leaves: Sequence[LeafSharding], weights: tuple[Params, Params]
    ) -> list[jax.Array]:
        pairs = zip(leaves, jax.tree.leaves(weights), strict=True)
        return [
            x if self._is_elsewhere(number, x) else to_view(leaf, x)
            for number, (leaf, x) in enumerate(pairs)
        ]

    def _is_elsewhere(self, number: int, array: jax.Array) -> bool:
        """Whether a leaf is in no array, and this has the numbers of its layers."""
        return number in self.stores and array.dtype == jnp.int32

    def prepare(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Cast and gather the parameters if that is done once a step."""
        if self.zero.gather == "use" and not self.zero.over_replicas:
            return list(shards)
        inside = self.inside_replica(shards)
        if self.zero.gather == "use":
            return inside
        pairs = zip(self.all_on_shard, inside, strict=True)
        return [self.collectives.gather(leaf, x) for leaf, x in pairs]

    def local(
        self, leaves: Sequence[LeafSharding], prepared: list[jax.Array], carry: PyTree
    ) -> list[jax.Array]:
        """The parameters that this shard trains: see `Reduction.local`."""
        if self.zero.reduce != "step":
            return prepared
        count = len(leaves)
        own = self.reduction.local(leaves, prepared[:count], carry)
        return [*own, *prepared[count:]]

    def inside_replica(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """The parameters as shards of a replica, in the dtypes of the computation."""
        dtypes, gather = self._computed_dtypes(shards), self.collectives.gather_replicas
        triples = zip(self.all_on_shard, shards, dtypes, strict=True)
        return [gather(leaf, x.astype(dtype)) for leaf, x, dtype in triples]

    def _computed_dtypes(self, shards: Sequence[jax.Array]) -> list[jnp.dtype]:
        """The dtype in which each leaf is computed on."""
        compute, count = self.precision.compute_dtype, len(self.leaves)
        frozen = [frozen_dtype(x.dtype, compute) for x in shards[count:]]
        return [compute] * count + frozen

    def call(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[jax.Array],
        prepared: Sequence[jax.Array],
        *args: Any,
    ) -> Any:
        """Evaluate ``fn(unsharded leaves, *args)`` on results of `differentiated`."""
        if self.zero.reduce == "step":
            given = [*leaves, *prepared[len(leaves) :]], *args
            return call_choosing_layers(fn, *given) if self.chooses else fn(*given)
        slots = [*leaves, *(None for _ in self.frozen)]
        dtypes = self._computed_dtypes(prepared)
        gathering = Gathering(
            self.collectives,
            ahead=self.prefetch,
            keep=self.zero.keep,
            over_replicas=self.replicas_at_once,
            is_done=self.zero.gather != "use",
        )
        given = zip(self.all_on_shard, slots, prepared, dtypes, strict=True)
        deferred = [
            GatheredAtUse(
                *(leaf, slot, source, dtype, gathering),
                self.stores[number] if self._is_elsewhere(number, source) else None,
            )
            for number, (leaf, slot, source, dtype) in enumerate(given)
        ]
        return call_gathering_at_use(fn, deferred, *args)

    def differentiated(
        self, shards: Sequence[jax.Array], prepared: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The arrays to differentiate: gathered leaves, or slots for their shards."""
        count = len(self.leaves)
        if self.zero.reduce == "step":
            return list(prepared[:count])
        dtype = self.collectives.communicated_dtype(self.precision.compute_dtype)
        pairs = zip(self.on_shard, shards[:count], strict=True)
        slots = [
            jnp.zeros(leaf.shard_view_shape if leaf.over_replicas else x.shape, dtype)
            for leaf, x in pairs
        ]
        for number in self.to_host:
            slots[number] = to_host(slots[number])
        for number in self.stores:
            if self._is_elsewhere(number, shards[number]):
                slots[number] = jnp.zeros(shards[number].shape)
        return slots

    def reduced(
        self, grads: Sequence[jax.Array], carry: PyTree, scale: jax.Array
    ) -> tuple[list[jax.Array], PyTree]:
        """Reduce gradients over the axes that the backward pass has not."""
        if self.zero.reduce == "step":
            return self.reduced_once(self.on_shard, grads, carry, scale)
        if self.replicas_at_once and not self.stores:
            return list(grads), carry
        if not self.stores:
            return self._by_reduction(
                self.reduction.between, self.on_shard, grads, carry, scale
            )
        pairs = enumerate(zip(self.on_shard, grads, strict=True))
        return [self._reduced(n, *pair) for n, pair in pairs], carry

    def reduced_once(
        self,
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        scale: jax.Array,
    ) -> tuple[list[jax.Array], PyTree]:
        """Reduce gradients by the reduction."""
        reduce = self.reduction.reduce_soundly
        return self._by_reduction(reduce, leaves, grads, carry, scale)

    def _by_reduction(
        self,
        reduce: Callable[..., tuple[list[jax.Array], PyTree]],
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        scale: jax.Array,
    ) -> tuple[list[jax.Array], PyTree]:
        """What it carries is without the loss scale, which is a power of two."""
        scales = self.precision.scales_loss and jax.tree.leaves(carry)
        given = [grad / scale for grad in grads] if scales else grads
        found, carry = reduce(leaves, given, carry, self.collectives)
        return ([grad * scale for grad in found] if scales else found), carry

    def _reduced(self, number: int, leaf: LeafSharding, grad: jax.Array) -> jax.Array:
        """One of `reduced`, where some leaves are in no array."""
        if number in self.stores:  # Sums of squares.
            return self.collectives.total_of_shards(self.leaves[number], grad)
        if self.replicas_at_once:
            return grad
        return self.collectives.reduce_replicas(leaf, grad)

    def mapped(
        self,
        body: Callable,
        out_specs: Any,
        *,
        whole: bool = False,
        carried: int = 0,
        apart: bool = False,
    ) -> Callable:
        """Run ``body(shards, inputs, *replicated)`` on every data shard's views.

        A shard is given its own rows, or with `whole` all rows. The last `carried`
        arguments are split along dim 0, the data shards. With `apart` the views are
        `local_views`.
        """
        if self.automatic:
            return body
        rows = rows_spec(self.mesh)
        leaves = self._apart_leaves if apart else self.all_leaves

        def run(shards: list, inputs: Inputs, *others: Any) -> Any:
            pairs = enumerate(zip(leaves, shards, strict=True))
            specs = [
                P() if self._is_elsewhere(number, x) else manual_spec(leaf)
                for number, (leaf, x) in pairs
            ]
            own = P() if whole else specs_of(inputs, rows)
            rest = *[P()] * (len(others) - carried), *[rows] * carried
            return jax.shard_map(
                body,
                mesh=self.mesh,
                in_specs=(specs, own, *rest),
                out_specs=out_specs,
                axis_names=set(batch_axes(self.mesh)),
                check_vma=False,
            )(shards, inputs, *others)

        return run
