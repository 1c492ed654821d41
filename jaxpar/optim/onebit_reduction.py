"""How is a momentum exchanged in one bit an element, once gradients have been enough?

In the warm-up gradients are reduced as ever, and every worker keeps the momentum of its
own. Then each adds its own gradient to the momentum that all have in common, and the
average of these is exchanged by their signs (`jaxpar.optim.sign_exchange`): it is the
next momentum, which the update gets in place of a gradient.

Source: Tang et al. 2021, "1-bit Adam".
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import EXPERT, PIPE, TENSOR, entry_of
from jaxpar.optim.sign_exchange import SCALE_BYTES, SignExchange, SignPiece
from jaxpar.sharding.collectives import Collectives, local_view
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import PLAIN, Reduction, Traffic, Wire, clip_factor
from jaxpar.types import PyTree

Leaves = Sequence[LeafSharding]


@dataclasses.dataclass(frozen=True)
class OneBitMomentum(Reduction):
    """The sum of gradients, and later the momentum, exchanged by signs.

    Attributes:
      freeze_step: steps of the warm-up.
      b1: the momentum's decay.
      clip_norm: the largest norm of gradients. In the warm-up of their sum; then one
        factor for all workers keeps the root mean square of their norms below it.
    """

    freeze_step: int
    b1: float
    clip_norm: float | None = None
    at_zero2: bool = True
    clips_itself: bool = True

    def init(self, leaves: Leaves) -> PyTree:
        """Whole on each worker: a momentum and an error; of its chunks another error.

        Args:
          leaves: as of `Reduction.init`.
        """
        workers = _workers(leaves)
        pieces = [SignPiece(leaf, workers) for leaf in leaves]

        def zeros(leaf: LeafSharding) -> jax.Array:
            return jnp.zeros(leaf.view_shape, jnp.float32)

        return {
            "count": jnp.int32(0),
            "norm": jnp.float32(0),
            "momentum": {leaf.name: zeros(leaf) for leaf in leaves},
            "worker": {leaf.name: zeros(leaf) for leaf in leaves},
            "server": {
                piece.leaf.name: jnp.zeros((piece.leaf.ways_placed, piece.chunk))
                for piece in pieces
            },
        }

    def begin(self, leaves: Leaves, opt_state: PyTree) -> PyTree:
        """See `Reduction`: the momentum is the optimizer's, and errors are zero."""
        known = tree.named_leaves(opt_state)
        carry = self.init(leaves)
        momentum = {
            leaf.name: known[f"mu/{leaf.name}"].reshape(leaf.view_shape)
            for leaf in leaves
        }
        count = known["count"].astype(jnp.int32)
        return {**carry, "count": count, "momentum": momentum}

    def reduce(
        self,
        leaves: Leaves,
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """See `Reduction`; by the step's number as it is without compression, or so."""
        names, count = [leaf.name for leaf in leaves], carry["count"]
        workers = _workers(leaves)
        local, own_norm = _own_gradients(leaves, grads, collectives)
        kept = [carry[part][name] for part in ("worker", "server") for name in names]

        def momenta(norm: jax.Array) -> list[jax.Array]:
            factor = (1 - self.b1) * clip_factor(norm, self.clip_norm)
            pairs = zip(names, local, strict=True)
            old = carry["momentum"]
            return [self.b1 * old[name] + factor * own for name, own in pairs]

        def warm(*kept: Any) -> tuple:
            given = [own / workers for own in local]
            found, _ = PLAIN.reduce(leaves, given, (), collectives)
            sums = [x.astype(jnp.float32) for x in found]
            norm = _norm_of_sums(leaves, sums, collectives)
            factor = clip_factor(norm, self.clip_norm)
            return [factor * x for x in sums], norm, momenta(norm), list(kept)

        def last(*kept: Any) -> tuple:
            sums, norm, momentum, errors = warm(*kept)
            axes = leaves[0].reduce_axes
            common = [jax.lax.psum(x, axes) / workers for x in momentum]
            return sums, norm, common, errors

        def compressed(*kept: Any) -> tuple:
            # One bit has no zero: what has had no gradient in the warm-up stays there.
            masks = [carry["momentum"][name] != 0 for name in names]
            found, errors = _exchanged(leaves, momenta(own_norm), masks, kept)
            pairs = zip(leaves, found, strict=True)
            return [_own_shard(*pair) for pair in pairs], own_norm, found, errors

        phase = (count >= self.freeze_step - 1).astype(jnp.int32)
        phase += (count >= self.freeze_step).astype(jnp.int32)
        branches = [warm, last, compressed]
        sums, norm, momentum, errors = jax.lax.switch(phase, branches, *kept)
        half = len(names)
        return sums, {
            "count": count + 1,
            "norm": jnp.where(jnp.isfinite(own_norm), norm, jnp.nan),
            "momentum": dict(zip(names, momentum, strict=True)),
            "worker": dict(zip(names, errors[:half], strict=True)),
            "server": dict(zip(names, errors[half:], strict=True)),
        }

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
        """See `Reduction`: that of the sum, later the root mean square of workers'."""
        return carry["norm"][0]

    def communicated(self, leaves: Leaves, wire: Wire) -> Traffic:
        """The sum of both phases', and of the step between: a program has all three."""
        found, workers = PLAIN.communicated(leaves, wire), _workers(leaves)
        over = wire.over(leaves[0].reduce_axes)
        kinds = found.setdefault(over, {})
        pieces = [SignPiece(leaf, workers) for leaf in leaves]
        sent = workers * sum(piece.num_bytes + SCALE_BYTES for piece in pieces)
        last = sum(4 * piece.size for piece in pieces)
        for kind, number in {
            "all-to-all": sent,
            "all-gather": sent,
            "all-reduce": last,
        }.items():
            kinds[kind] = kinds.get(kind, 0) + number
        again = PLAIN.communicated(leaves, wire)  # In the step between, once more.
        for axes, own in again.items():
            for kind, number in own.items():
                found[axes][kind] = found[axes].get(kind, 0) + number
        return found

    def notes(self) -> tuple[str, ...]:
        """See `Reduction`."""
        return (
            f"data: after {self.freeze_step} steps momenta are exchanged by their "
            "signs; each worker has a whole momentum and a whole error, 8 bytes a "
            "parameter. grad_norm is then the root mean square of the workers' own.",
        )


def _workers(leaves: Leaves) -> int:
    """The data shards, which all leaves are averaged over.

    Raises:
      ValueError: if experts are on an axis of their own.
    """
    first = leaves[0]
    for leaf in leaves:
        if set(leaf.reduce_axes) != set(first.reduce_axes):
            raise ValueError(
                f"optimizer: OneBitMomentum can't run with expert="
                f"{leaf.sizes[EXPERT]}: {leaf.name} is averaged over other data shards "
                f"than {first.name}. Use expert=1, or another optimizer."
            )
    return math.prod(leaves[0].sizes[axis] for axis in leaves[0].reduce_axes)


def _own_gradients(
    leaves: Leaves, grads: Sequence[jax.Array], collectives: Collectives
) -> tuple[list[jax.Array], jax.Array]:
    """A worker's gradients as views, and the root mean square of all workers' norms.

    All shards have that before any branch begins: collectives in branches that run
    beside others end XLA's CPU backend, whose devices take them in any order.
    """
    workers = _workers(leaves)
    pairs = zip(leaves, grads, strict=True)
    views = [local_view(leaf, grad).astype(jnp.float32) for leaf, grad in pairs]
    local = [workers * view for view in views]
    square = optax.tree.norm(local, squared=True)
    norm = jnp.sqrt(collectives.total(square) / workers)
    norm, local = jax.lax.optimization_barrier((norm, local))
    return local, norm


def _norm_of_sums(
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


def _exchanged(
    leaves: Leaves,
    arrays: Sequence[jax.Array],
    masks: Sequence[jax.Array],
    errors: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Averages of views, and the new errors of workers and servers."""
    pieces = [SignPiece(leaf, _workers(leaves)) for leaf in leaves]
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


def _own_shard(leaf: LeafSharding, view: jax.Array) -> jax.Array:
    """The part of a whole view that this data shard stores."""
    dim = leaf.view_data_dim
    if dim is None:
        return view
    size = view.shape[dim] // leaf.data_ways
    index = jax.lax.axis_index(leaf.data_axes)
    return jax.lax.dynamic_slice_in_dim(view, index * size, size, dim)
