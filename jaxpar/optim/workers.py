"""What does each data shard have and exchange, where all are workers of one optimizer?

For reductions that exchange signs, inside ``shard_map`` with the batch axes manual.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import EXPERT, PIPE, TENSOR, entry_of
from jaxpar.optim.sign_exchange import SCALE_BYTES, SignExchange, SignPiece
from jaxpar.sharding.collectives import Collectives, local_view, on_placed_shards
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import Reduction, Traffic, Wire
from jaxpar.types import PyTree

Leaves = Sequence[LeafSharding]


class SignReduction(Reduction):
    """What reductions by signs have in common.

    Each carries "norm", a scalar: that of the sum where whole gradients are reduced,
    and else the root mean square of the workers' own.
    """

    at_zero2 = True
    clips_itself = True

    def reduce_soundly(
        self,
        leaves: Leaves,
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """As `reduce`: the norm that it carries is not finite if a gradient is not."""
        return self.reduce(leaves, grads, carry, collectives)

    def carried_norm(self, carry: PyTree) -> jax.Array:
        """See `Reduction`."""
        return carry["norm"][0]

    def communicated(self, leaves: Leaves, wire: Wire) -> Traffic:
        """Of a step that exchanges signs, which is the one that is explained."""
        workers = workers_of(leaves)
        pieces = [SignPiece(leaf, workers) for leaf in leaves]
        sent = workers * sum(piece.num_bytes + SCALE_BYTES for piece in pieces)
        over = wire.over(leaves[0].reduce_axes)
        return {over: {"all-to-all": sent, "all-gather": sent}}


def zero_errors(leaves: Leaves) -> dict[str, dict[str, jax.Array]]:
    """Of workers, each whole, and of servers, each of its chunks."""
    workers = workers_of(leaves)
    pieces = [SignPiece(leaf, workers) for leaf in leaves]
    return {
        "worker": {x.name: jnp.zeros(x.view_shape, jnp.float32) for x in leaves},
        "server": {
            piece.leaf.name: jnp.zeros((piece.leaf.ways_placed, piece.chunk))
            for piece in pieces
        },
    }


def workers_of(leaves: Leaves) -> int:
    """The data shards, which all leaves are averaged over.

    Raises:
      ValueError: if experts are on an axis of their own.
    """
    first = leaves[0]
    for leaf in leaves:
        if set(leaf.reduce_axes) != set(first.reduce_axes):
            raise ValueError(
                f"optimizer: data shards can't be its workers with expert="
                f"{leaf.sizes[EXPERT]}: {leaf.name} is averaged over other data shards "
                f"than {first.name}. Use expert=1, or another optimizer."
            )
    return math.prod(leaves[0].sizes[axis] for axis in leaves[0].reduce_axes)


def own_gradients(
    leaves: Leaves, grads: Sequence[jax.Array], collectives: Collectives
) -> tuple[list[jax.Array], jax.Array]:
    """A worker's gradients as views, and the root mean square of all workers' norms.

    All shards have that before any branch begins: collectives in branches that run
    beside others end XLA's CPU backend, whose devices take them in any order.
    """
    workers = workers_of(leaves)
    pairs = zip(leaves, grads, strict=True)
    views = [local_view(leaf, grad).astype(jnp.float32) for leaf, grad in pairs]
    local = [workers * view for view in views]
    square = optax.tree.norm(local, squared=True)
    norm = jnp.sqrt(collectives.total(square) / workers)
    norm, local = jax.lax.optimization_barrier((norm, local))
    return local, norm


def norm_of_sums(
    leaves: Leaves, sums: Sequence[jax.Array], collectives: Collectives
) -> jax.Array:
    """The norm of gradients that are summed, each as its leaf is stored."""
    pairs = list(zip(leaves, sums, strict=True))
    split = [(leaf, x) for leaf, x in pairs if leaf.is_split]
    square = optax.tree.norm(
        [x for leaf, x in pairs if not leaf.is_split], squared=True
    )
    if split:
        own = optax.tree.norm([x for _, x in split], squared=True)
        square += collectives.total_of_shards(split[0][0], own)
    return jnp.sqrt(square)


def whole_sum(
    leaf: LeafSharding, view: jax.Array, collectives: Collectives
) -> jax.Array:
    """The sum of all workers' views, whole on each, fp32."""
    reduce = functools.partial(jax.lax.psum, axis_name=leaf.reduce_axes)
    sent = view.astype(collectives.communicated_dtype(view.dtype))
    return on_placed_shards(reduce, leaf)(sent).astype(jnp.float32)


def exchanged_signs(
    leaves: Leaves,
    arrays: Sequence[jax.Array],
    masks: Sequence[jax.Array],
    errors: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Averages of views, and the new errors of workers and servers."""
    pieces = [SignPiece(leaf, workers_of(leaves)) for leaf in leaves]
    exchange = SignExchange(pieces, leaves[0].reduce_axes)
    count = len(leaves)

    def on_pieces(arrays: list, masks: list, worker: list, server: list) -> tuple:
        def flat(views: list) -> list:
            return [x.reshape(-1) for x in views]

        def shaped(own: list) -> list:
            return [x.reshape(view.shape) for x, view in zip(own, arrays, strict=True)]

        given = flat(arrays), flat(masks), flat(worker), [x[0] for x in server]
        found, new_worker, new_server = exchange(*given)
        return shaped(found), shaped(new_worker), [x[None] for x in new_server]

    views = [leaf.view_spec(data=False) for leaf in leaves]
    rows = [P(entry_of([a for axes in leaf.placed for a in axes])) for leaf in leaves]
    found, worker, server = jax.shard_map(
        on_pieces,
        in_specs=(views, views, views, rows),
        out_specs=(views, views, rows),
        axis_names={PIPE, TENSOR},
        check_vma=False,
    )(list(arrays), list(masks), list(errors[:count]), list(errors[count:]))
    return found, [*worker, *server]


def own_shard(leaf: LeafSharding, view: jax.Array) -> jax.Array:
    """The part of a whole view that this data shard stores."""
    dim = leaf.view_data_dim
    if dim is None:
        return view
    size = view.shape[dim] // jax.lax.axis_size(leaf.storage_axes)
    index = jax.lax.axis_index(leaf.storage_axes)
    return jax.lax.dynamic_slice_in_dim(view, index * size, size, dim)
