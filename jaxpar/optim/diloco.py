"""DiLoCo: replicas train by themselves, and an outer optimizer joins them at times.

Each replica has an inner optimizer's state and parameters of its own: those that all
have in common plus what it has moved by. Every so many steps the mean of that is the
outer optimizer's gradient, with the sign turned; all go on from what it makes. With
plain averaging (``outer=optax.sgd(1.0)``) this is local SGD.

Sources: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of
Language Models"; Douillard et al. 2025, "Streaming DiLoCo with overlapping
communication", for fragments; Stich 2019, "Local SGD Converges Fast and Communicates
Little". Differs: a replica's gradient is the number of replicas times its part of the
step's gradient, so that weights of rows count as they do in one run.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import REPLICA
from jaxpar.optim.applied import updated_if
from jaxpar.optim.optax_update import learning_rate_in
from jaxpar.sharding.collectives import Collectives
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import (
    PLAIN,
    PlainReduction,
    Reduction,
    Traffic,
    Wire,
    clip_factor,
)
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import Metrics, Params, PyTree

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiLoCoState:
    """The state.

    Attributes:
      count: steps.
      inner: the inner optimizer's state, a leading dim of the replicas.
      moved: what each replica's parameters have moved by since they were joined,
        likewise.
      outer: by fragment, the outer optimizer's state.
    """

    count: Any
    inner: PyTree
    moved: Params
    outer: list[PyTree]


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """The optimizer; see `diloco`."""

    inner: optax.GradientTransformation
    replicas: int
    every: int
    outer: optax.GradientTransformation
    fragments: int

    def init(self, params: Params) -> DiLoCoState:
        """See `MakesUpdate`."""

        def stacked(x: Any) -> jax.Array:
            return jnp.broadcast_to(x, (self.replicas, *jnp.shape(x)))

        inner = jax.tree.map(stacked, self.inner.init(params))
        moved = jax.tree.map(lambda x: jnp.zeros_like(stacked(x)), params)
        leaves = tree.named_leaves(params)
        parts = [{n: leaves[n] for n in names} for names in self.names(params)]
        outer = list(map(self.outer.init, parts))
        return DiLoCoState(jnp.int32(0), inner, moved, outer)

    def names(self, params: Params) -> list[list[str]]:
        """By fragment, names of its parameters: of about as many bytes each."""
        leaves = tree.named_leaves(params)
        total, before = sum(math.prod(x.shape) for x in leaves.values()), 0
        found: list[list[str]] = [[] for _ in range(self.fragments)]
        for name, x in leaves.items():
            size = math.prod(x.shape)
            middle = (2 * before + size) * self.fragments // (2 * total)
            found[min(middle, self.fragments - 1)].append(name)
            before += size
        return found

    def make_update(self, spec: UpdateSpec) -> Update:
        """See `MakesUpdate`.

        Raises:
          ValueError: if the mesh has another number of replicas, or they split the
            state.
        """
        found = spec.mesh.shape.get(REPLICA, 1)
        if found != self.replicas:
            raise ValueError(
                f"diloco: replicas={self.replicas} must be the mesh's, which has "
                f"replica={found}; use jaxpar.MeshShape(replica={self.replicas}, "
                "data=...): the state has a part for each."
            )
        if any(leaf.over_replicas for leaf in spec.leaf_shardings):
            raise ValueError(
                "diloco: replicas train by themselves, each with all of the state, and "
                "zero=ZeroPlusPlus(secondary=True) splits it; use secondary=False."
            )
        return DiLoCoUpdate(self, spec)


class ReplicaGradients(PlainReduction):
    """Gradients that are summed inside replicas, and differ between them."""

    apart = (REPLICA,)
    clips_itself = True

    def between(
        self,
        leaves: Sequence[LeafSharding],
        views: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """See `Reduction`: each replica's own gradient."""
        del leaves, collectives
        return [jax.lax.axis_size(REPLICA) * view for view in views], carry

    def norm(self, grads: PyTree) -> jax.Array:
        """See `Reduction`: the root mean square of the replicas' norms."""
        replicas = jax.tree.leaves(grads)[0].shape[0]
        return super().norm(grads) / math.sqrt(replicas)

    def communicated(self, leaves: Sequence[LeafSharding], wire: Wire) -> Traffic:
        """See `Reduction`: in steps that join, also what replicas moved by, fp32."""
        own = [leaf.not_reduced_over(self.apart) for leaf in leaves]
        moved = sum(4 * math.prod(leaf.shape) // leaf.ways_stored for leaf in own)
        joins = {wire.over(self.apart): {"all-reduce": moved}}
        return {**PLAIN.communicated(own, wire), **joins}


@dataclasses.dataclass(frozen=True)
class DiLoCoUpdate(Update):
    """The update of DiLoCo; packed parameters have what replicas moved by beside them.

    Attributes:
      own: the optimizer.
      spec: the run.
    """

    own: DiLoCo
    spec: UpdateSpec
    reduction: Reduction = dataclasses.field(default_factory=ReplicaGradients)

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        packed = {"common": params, "moved": opt_state.moved}
        return packed, dataclasses.replace(opt_state, moved=())

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        if isinstance(opt_state, DiLoCoState):
            opt_state = dataclasses.replace(opt_state, moved=params["moved"])
        return params["common"], opt_state

    def logical_shardings(
        self, params: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """See `Update`: replicas split the leading dim, and a parameter's axes its."""
        leaves = {leaf.name: leaf for leaf in self.spec.leaf_shardings}

        def placed(part: PyTree) -> PyTree:
            named = tree.named_leaves(part).items()
            specs = [self._stacked_spec(leaves, name, x.shape) for name, x in named]
            places = [NamedSharding(self.spec.mesh, spec) for spec in specs]
            return jax.tree.unflatten(jax.tree.structure(part), places)

        shapes = self.spec.opt_state
        stacked = {"inner": placed(shapes.inner), "moved": placed(shapes.moved)}
        return params, dataclasses.replace(opt_state, **stacked)

    def _stacked_spec(
        self, leaves: dict[str, LeafSharding], name: str, shape: tuple[int, ...]
    ) -> P:
        for end in (f"/{name}"[n + 1 :] for n, x in enumerate(f"/{name}") if x == "/"):
            if end in leaves and leaves[end].shape == shape[1:]:
                return leaves[end].stacked(ReplicaGradients.apart).stored_spec
        return P(REPLICA)

    def at_new_params(self, opt_state: PyTree) -> PyTree:
        """See `Update`: all replicas go on from there."""
        return dataclasses.replace(opt_state, moved=tree.zeros(opt_state.moved))

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        return self.pack(params, opt_state)

    def compute_params(self, params: PyTree) -> Params:
        """See `Update`: what all have in common."""
        return params["common"]

    def local_params(self, params: PyTree) -> Params:
        """See `Update`: where each replica is."""
        return jax.tree.map(jnp.add, params["common"], params["moved"])

    def apply(
        self,
        grads: PyTree,
        params: PyTree,
        opt_state: PyTree,
        *,
        factor: jax.Array,
        applied: jax.Array,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree, Metrics]:
        """See `Update`."""
        del loss
        own = optax.tree.scale(factor, optax.tree.cast(grads, jnp.float32))
        found = updated_if(applied, self._stepped, (params, opt_state), own)
        joined = jnp.where(applied, self._joins(opt_state.count, 0), False)
        first = jax.tree.map(lambda x: x[0], found[1].inner)
        metrics = {"joined": joined.astype(jnp.float32), **learning_rate_in(first)}
        return *found, metrics

    def _stepped(self, before: PyTree, grads: PyTree) -> PyTree:
        params, state = before

        def inner(grads: PyTree, state: PyTree, moved: PyTree) -> tuple:
            norm = optax.tree.norm(grads)
            clipped = optax.tree.scale(clip_factor(norm, self.spec.clip_norm), grads)
            own = jax.tree.map(jnp.add, params["common"], moved)
            updates, state = self.own.inner.update(clipped, state, own)
            return jax.tree.map(jnp.add, moved, updates), state

        moved, inner_state = jax.vmap(inner)(grads, state.inner, params["moved"])
        common, outer = dict(tree.named_leaves(params["common"])), []
        named = dict(tree.named_leaves(moved))
        for number, names in enumerate(self.own.names(params["common"])):
            given = {n: common[n] for n in names}, {n: named[n] for n in names}
            part, own_moved, own_state = jax.lax.cond(
                self._joins(state.count, number),
                self._joined,
                lambda *same: same,
                *(*given, state.outer[number]),
            )
            common |= part
            named |= own_moved
            outer.append(own_state)
        structure = jax.tree.structure(params["common"])
        packed = {
            "common": jax.tree.unflatten(structure, common.values()),
            "moved": jax.tree.unflatten(structure, named.values()),
        }
        return packed, DiLoCoState(state.count + 1, inner_state, (), outer)

    def _joins(self, count: jax.Array, fragment: int) -> jax.Array:
        """Whether a step joins a fragment: each at another step of `every`."""
        own = self.own
        late = fragment * own.every // own.fragments
        return (count + 1 + late) % own.every == 0

    def _joined(
        self, common: PyTree, moved: PyTree, state: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """A fragment after the outer optimizer's step."""
        means = jax.tree.map(lambda x: -x.mean(0), moved)
        updates, state = self.own.outer.update(means, state, common)
        new = optax.apply_updates(common, updates)
        return new, optax.tree.zeros_like(moved), state

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        own = self.own
        return (
            f"optimizer: {own.replicas} replicas train by themselves, with an inner "
            f"state each, and are joined every {own.every} steps. grad_norm is the "
            "root mean square of theirs; evaluation has the parameters joined last.",
        )


def diloco(
    inner: optax.GradientTransformation,
    *,
    replicas: int,
    every: int = 100,
    outer: optax.GradientTransformation = OUTER,
    fragments: int = 1,
) -> DiLoCo:
    """Replicas of the mesh that train by themselves, and are joined at times.

    Inside a replica any ZeRO stage, tensor and pipe. Between replicas a step sends only
    scalars; one in `every` sends 4 bytes a parameter of a device's shard.

    Args:
      inner: each replica's optimizer, such as ``optax.adamw(3e-4)``.
      replicas: of the mesh, such as the sites.
      every: steps between two joins.
      outer: gets the negative mean of what replicas moved by as a gradient.
        ``optax.sgd(1.0)`` averages parameters (local SGD).
      fragments: parts of the parameters that are joined at different steps, so that
        less is sent at a time.

    Raises:
      ValueError: if a number is out of range.

    Sources: Douillard et al. 2023, "DiLoCo"; Stich 2019, "Local SGD Converges Fast and
    Communicates Little".

    Example:
      >>> diloco(optax.adamw(3e-4), replicas=2, every=50).every
      50
    """
    if replicas < 2:
        raise ValueError(
            f"diloco: replicas={replicas} must be at least 2: they are what is joined. "
            "On one, use the inner optimizer alone."
        )
    if every < 1:
        raise ValueError(f"diloco: every={every} must be at least 1.")
    if not 1 <= fragments <= every:
        raise ValueError(
            f"diloco: fragments={fragments} must be from 1 to every={every}: each is "
            "joined at a step of its own."
        )
    return DiLoCo(inner, replicas, every, outer, fragments)
