"""How are a step's gradients computed: summed over micro-batches, reduced over data.

The loss of a step is sum(total) / sum(weight) over the global batch. Each micro-batch's
backward pass is seeded by scale / weight, so fp16 totals don't overflow, and its
gradients are multiplied by the weight in fp32. One division at the end makes the sum
exact, however the rows are split. Where a ZeRO stage reduces once a step, only scalars
are reduced over data before that.
"""

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
from jaxpar.sharding.torus import torus_dims
from jaxpar.sharding.zero import ZeroStage
from jaxpar.step.gather_at_use import call_gathering_at_use
from jaxpar.step.gathered_leaf import GatheredAtUse, Gathering
from jaxpar.step.halves import in_halves
from jaxpar.step.inputs import Inputs, microbatch_rows, specs_of, with_keys
from jaxpar.step.layer_store import LayerStore
from jaxpar.step.loss import Loss, Sums, make_loss
from jaxpar.step.precision import Precision, frozen_dtype
from jaxpar.step.reduction import PLAIN, Reduction, of_own_part
from jaxpar.step.row_draws import Draws, OwnRows, ShardKey
from jaxpar.step.weighted import merged, of_no_examples
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
        return ManualCollectives(axes, own.reduce_dtype, self.platform, torus)

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
        return leaves if self.automatic else tuple(leaf.on_shard for leaf in leaves)

    @property
    def platform(self) -> str:
        """The mesh's platform."""
        return self.mesh.devices.flat[0].platform

    def shard_key(self, key: jax.Array) -> ShardKey:
        """A key that all shards share, with this shard's number."""
        return ShardKey(key, self.collectives.shard_number())

    def views(self, weights: tuple[Params, Params]) -> list[jax.Array]:
        """The stored parameters as views: those that are trained, and the others."""
        pairs = zip(self.all_leaves, jax.tree.leaves(weights), strict=True)
        return [
            x if self._is_elsewhere(number, x) else to_view(leaf, x)
            for number, (leaf, x) in enumerate(pairs)
        ]

    def _is_elsewhere(self, number: int, array: jax.Array) -> bool:
        """Whether a leaf is in no array, and this has the numbers of its layers."""
        return number in self.stores and array.dtype == jnp.int32

    def prepare(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Cast and gather the parameters if that is done once a step."""
        if self.zero.gather == "use":
            return list(shards)
        return [
            self.collectives.gather(p, x)
            for p, x in zip(self.all_on_shard, self.cast(shards), strict=True)
        ]

    def local(
        self, leaves: Sequence[LeafSharding], prepared: list[jax.Array], carry: PyTree
    ) -> list[jax.Array]:
        """The parameters that this shard trains: see `Reduction.local`."""
        if self.zero.reduce != "step":
            return prepared
        count = len(leaves)
        own = self.reduction.local(leaves, prepared[:count], carry)
        return [*own, *prepared[count:]]

    def cast(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """The parameters in the dtypes in which they are computed on."""
        dtypes = self._computed_dtypes(shards)
        return [x.astype(dtype) for x, dtype in zip(shards, dtypes, strict=True)]

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
            return fn([*leaves, *prepared[len(leaves) :]], *args)
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
        slots = [jnp.zeros(shard.shape, dtype) for shard in shards[:count]]
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
        pairs = enumerate(zip(self.on_shard, grads, strict=True))
        return [self._reduced(n, *pair) for n, pair in pairs], carry

    def reduced_once(
        self,
        leaves: Sequence[LeafSharding],
        grads: Sequence[jax.Array],
        carry: PyTree,
        scale: jax.Array,
    ) -> tuple[list[jax.Array], PyTree]:
        """Reduce gradients by the reduction.

        What it carries is without the loss scale, which is a power of two.
        """
        scales = self.precision.scales_loss and jax.tree.leaves(carry)
        given = [grad / scale for grad in grads] if scales else grads
        reduce = self.reduction.reduce_soundly
        found, carry = reduce(leaves, given, carry, self.collectives)
        return ([grad * scale for grad in found] if scales else found), carry

    def _reduced(self, number: int, leaf: LeafSharding, grad: jax.Array) -> jax.Array:
        """One of `reduced`, of a leaf that is reduced by micro-batch."""
        if number in self.stores:  # Sums of squares.
            return self.collectives.total_of_shards(self.leaves[number], grad)
        if self.replicas_at_once:
            return grad
        return self.collectives.reduce_replicas(leaf, grad)

    def mapped(
        self, body: Callable, out_specs: Any, *, whole: bool = False, carried: int = 0
    ) -> Callable:
        """Run ``body(shards, inputs, *replicated)`` on every data shard's views.

        A shard is given its own rows, or with `whole` all rows. The last `carried`
        arguments are split along dim 0, the data shards.
        """
        if self.automatic:
            return body
        rows = rows_spec(self.mesh)

        def run(shards: list, inputs: Inputs, *others: Any) -> Any:
            pairs = enumerate(zip(self.all_leaves, shards, strict=True))
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


def make_gradients(
    partition: Partition, loss: Loss, like: tuple[Params, Params], accumulate: int
) -> Callable[..., tuple[Params, Sums, PyTree, PyTree]]:
    """Make ``(weights, model_state, inputs, key, scale, carry) -> (grads, sums, ...)``.

    Args:
      partition: how the loss function is run from shards.
      loss: the loss function.
      like: of the structure of `TrainState.weights`.
      accumulate: micro-batches a step.

    Returns:
      A pure function, to be traced under the mesh. It returns the gradients of scale *
      sum(total) / sum(weight), at the storage specs, in the dtype of the reduction;
      the step's sums; the model's new state; and what the partition's reduction
      carries, as `carry`: a tree of arrays whose dim 0 is the data shards.
    """
    shards = num_batch_shards(partition.mesh)
    draws = OwnRows(2 * shards) if partition.halves else partition.draws
    given = partition.network, loss, jax.tree.structure(like), draws
    loss_of = make_loss(*given, training=True)
    if partition.halves:
        loss_of = in_halves(loss_of)

    def microbatch(shards, prepared, model_state, key, scale, inputs):
        def total(leaves: list) -> tuple[jax.Array, tuple]:
            sums, state = partition.call(
                loss_of, leaves, prepared, model_state, key, inputs
            )
            return sums.loss.total, (sums, state)

        leaves = partition.differentiated(shards, prepared)
        _, pull, (sums, state) = jax.vjp(total, leaves, has_aux=True)
        # The weight of all shards: a backward pass that is not linear (clipped or
        # rounded cotangents) then sees the same numbers as on one device.
        weight = partition.collectives.total(sums.loss.weight)
        (grads,) = pull(jnp.where(weight > 0, scale / weight, 0.0))
        if accumulate > 1:
            grads = [grad.astype(jnp.float32) * weight for grad in grads]
        return grads, sums, state

    def body(shards, inputs, model_state, key, scale, carry):
        prepared = partition.local(partition.on_shard, partition.prepare(shards), carry)
        key = partition.shard_key(key)

        def one(model_state, index, rows):
            own = key.fold_in(index)
            return microbatch(shards, prepared, model_state, own, scale, rows)

        grads, sums, state = _accumulated(one, model_state, inputs, accumulate)
        sums = sums.over_data(partition.collectives)
        if accumulate > 1:
            weight = sums.loss.weight
            inverse = jnp.where(weight > 0, 1.0 / weight, 0.0)
            grads = [grad * inverse for grad in grads]
        grads, carry = partition.reduced(grads, carry, scale)
        return grads, sums, state, carry

    return gradients_on_shards(partition, jax.tree.structure(like[0]), body)


def gradients_on_shards(
    partition: Partition, structure: Any, body: Callable[..., tuple]
) -> Callable[..., tuple[Params, Sums, PyTree, PyTree]]:
    """Run ``body(shards, inputs, model_state, key, scale, carry)`` on every shard.

    Args:
      partition: the leaves' shardings.
      structure: of the trained parameters.
      body: is given views, and what this shard carries. It returns gradients as the
        reduction does, sums over all data, the model's state, and what is carried.

    Returns:
      The same as `make_gradients`.
    """
    reduction, leaves = partition.reduction, partition.leaves

    elsewhere = partition.stores
    views = [
        P() if number in elsewhere else reduction.out_spec(leaf)
        for number, leaf in enumerate(leaves)
    ]
    out_specs = views, P(), P(), rows_spec(partition.mesh)
    run = partition.mapped(of_own_part(body), out_specs, carried=1)

    def gradients(weights, model_state, inputs, key, scale, carry):
        shards, inputs = partition.views(weights), with_keys(inputs, key)
        grads, *rest = run(shards, inputs, model_state, key, scale, carry)
        pairs = enumerate(zip(leaves, grads, strict=True))
        grads = [
            pair[1] if number in elsewhere else reduction.as_gradient(*pair)
            for number, pair in pairs
        ]
        return jax.tree.unflatten(structure, grads), *rest

    return gradients


def _accumulated(
    one: Callable[..., tuple], model_state: PyTree, inputs: Inputs, accumulate: int
) -> tuple[list[jax.Array], Sums, PyTree]:
    """Add up ``one(model_state, index, rows)`` over the micro-batches."""
    if accumulate == 1:
        return one(model_state, 0, inputs)

    def add(carry: tuple, index: jax.Array) -> tuple[tuple, None]:
        grads, sums, state = carry
        rows = microbatch_rows(inputs, index, accumulate)
        new_grads, new_sums, state = one(state, index, rows)
        grads = jax.tree.map(jnp.add, grads, new_grads)
        return (grads, merged(sums, new_sums), state), None

    first = microbatch_rows(inputs, 0, accumulate)
    grads, sums, _ = jax.eval_shape(lambda: one(model_state, 0, first))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
    start = (zeros, of_no_examples(sums), model_state)
    carry, _ = jax.lax.scan(add, start, jnp.arange(accumulate))
    return carry
