"""How is a run's state stored: its shapes and shardings, decided once."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxpar.checkpoint.former_names import former_names
from jaxpar.checkpoint.shard_parts import ShardParts
from jaxpar.jaxprs.pieces import compute_in_pieces
from jaxpar.mesh import are_present, batch_axes
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.memory_kinds import (
    KindAlone,
    has_memory_kinds,
    in_memory_of,
    is_on_host,
)
from jaxpar.sharding.zero import ZeroStage
from jaxpar.step.carried import Carried, begin_parts
from jaxpar.step.state import (
    TrainState,
    pack_state,
    packed_structs,
    state_shardings,
    unpack_state,
    with_shard_parts,
)
from jaxpar.step.update import HostUpdate, StoresApart, Update
from jaxpar.tree import named_leaves
from jaxpar.types import Params, PyTree

_BEFORE_CARRIED = ("carried/loss_scale/*", "loss_scale/*")
"""The loss scale was a field of the state."""

_TRAINED_OR_NOT = (("frozen/*", "params/*"), ("params/*", "frozen/*"))
"""Another run may have trained a parameter that this one does not, and the reverse."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The state's shapes and shardings.

    Attributes:
      mesh: the mesh.
      abstract: the train state's shapes.
      leaves: parameter name -> sharding, of those that are not trained too.
      zero: the row of the ZeRO table.
      update: the optimizer, and how it stores the state.
      carried: the parts of ``state.carried``.
      renamed: (name of a parameter, its name in older checkpoints); both may end in
        ``/*``.
    """

    mesh: Mesh
    abstract: TrainState
    leaves: dict[str, LeafSharding]
    zero: ZeroStage
    update: Update
    carried: Sequence[Carried]
    renamed: Sequence[tuple[str, str]] = ()

    @functools.cached_property
    def former(self) -> dict[str, tuple[str, ...]]:
        """Leaf of the state -> its names in older checkpoints."""
        names = named_leaves(self.abstract)
        pairs = (*self.renamed, _BEFORE_CARRIED, *_TRAINED_OR_NOT)
        return former_names(names, [*self.leaves, *names], pairs)

    @functools.cached_property
    def parts(self) -> ShardParts:
        """Which parts of the state are per shard, and which are not saved."""
        sizes, axes = self.mesh.shape, batch_axes(self.mesh)
        named = {f"carried/{part.name}": part for part in self.carried}
        return ShardParts(
            axes={axis: sizes[axis] for axis in axes if sizes[axis] > 1},
            per_shard=tuple(path for path, part in named.items() if part.per_shard),
            unsaved=tuple(path for path, part in named.items() if not part.saved),
        )

    @property
    def trained(self) -> list[LeafSharding]:
        """The shardings of the parameters that are trained."""
        return [self.leaves[name] for name in named_leaves(self.abstract.params)]

    @property
    def frozen(self) -> list[tuple[LeafSharding, jnp.dtype]]:
        """The shardings and dtypes of the others."""
        named = named_leaves(self.abstract.frozen)
        return [(self.leaves[name], leaf.dtype) for name, leaf in named.items()]

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The shardings of the logical state."""
        ruled = self.abstract, self.leaves, self.zero, self.mesh
        return state_shardings(*ruled, self.update, self.carried)

    @functools.cached_property
    def can_run(self) -> bool:
        """Whether the mesh's devices can run programs, not only be compiled for."""
        return are_present(self.mesh)

    def structs(self) -> TrainState:
        """The logical state's shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            self.abstract,
            self.shardings,
        )

    @functools.cached_property
    def packed(self) -> TrainState:
        """The packed state, which steps carry: shapes, dtypes and shardings."""
        return packed_structs(self.update, self.abstract, self.shardings)

    @functools.cached_property
    def packed_shardings(self) -> TrainState:
        """The shardings of `packed`."""
        return jax.tree.map(lambda x: x.sharding, self.packed)

    @functools.cached_property
    def on_host(self) -> tuple[int, ...]:
        """Numbers of the packed leaves of the parameters and the optimizer in host
        memory, where shardings keep no memory kinds; empty elsewhere."""
        if has_memory_kinds(self.mesh):
            return ()
        kinds = self.update.shardings(*self._logical_kinds)
        blank = jax.tree.map(lambda _: KindAlone(), self.packed)
        state = dataclasses.replace(blank, params=kinds[0], opt_state=kinds[1])
        leaves = enumerate(jax.tree.leaves(state))
        return tuple(number for number, kind in leaves if is_on_host(kind))

    @property
    def early_grads(self) -> tuple[int, ...]:
        """Those of `host_grads` that go there as they are reduced."""
        own = self.update
        early = isinstance(own, HostUpdate) and own.grads_leave_early
        return self.host_grads if early else ()

    @property
    def _logical_kinds(self) -> tuple[PyTree, PyTree]:
        """The memory kinds of the logical parameters and optimizer state."""
        own = self.shardings.params, self.shardings.opt_state
        kinds = jax.tree.map(lambda _: KindAlone(), own)
        return self.update.logical_shardings(*kinds)

    @functools.cached_property
    def host_grads(self) -> tuple[int, ...]:
        """Numbers of the packed gradients that a `HostUpdate` gets in host memory."""
        if not isinstance(self.update, HostUpdate):
            return ()
        kinds = self.update.grads_shardings(self._logical_kinds[0])
        leaves = enumerate(jax.tree.leaves(kinds))
        return tuple(number for number, kind in leaves if is_on_host(kind))

    def pack(self, state: TrainState) -> TrainState:
        """Convert a logical state to the optimizer's packed form."""
        return in_memory_of(pack_state(self.update, state), self.packed_shardings)

    def unpack(self, packed: TrainState) -> TrainState:
        """Undo `pack`; returns shapes on compile-only devices."""
        if not self.can_run:
            return self.structs()
        return in_memory_of(unpack_state(self.update, packed), self.shardings)

    def at_new_params(self, state: TrainState) -> TrainState:
        """A logical state whose parameters have been replaced."""
        opt_state = self.update.at_new_params(state.opt_state)
        own = {p.name: p.at_new_params(state.carried[p.name]) for p in self.carried}
        return dataclasses.replace(
            state, opt_state=opt_state, carried=state.carried | own
        )

    def begin_parts(
        self, state: TrainState, read: TrainState, paths: Collection[str]
    ) -> TrainState:
        """A logical state whose parts at some paths, "carried/...", start anew.

        Before the first step, so do those that were not read: an average of the initial
        parameters is one of those that were restored.

        Args:
          state: the logical state.
          read: what was read of it, with structs for the rest.
          paths: of the parts.
        """
        is_new = int(state.step) == 0
        own = [
            part
            for part in self.carried
            if f"carried/{part.name}" in paths
            or (is_new and not _is_read(read.carried[part.name]))
        ]
        if not own:
            return state

        def begin(params: Params, opt_state: PyTree) -> dict[str, PyTree]:
            return begin_parts(own, params, opt_state, self.mesh)

        places = {part.name: self.shardings.carried[part.name] for part in own}
        begun = jax.jit(begin, out_shardings=places)(state.params, state.opt_state)
        return dataclasses.replace(state, carried=state.carried | begun)

    def initial_state(
        self, init: Callable[[jax.Array], TrainState], seed: int
    ) -> TrainState:
        """Initialise the packed state; returns `packed` on compile-only devices."""
        if not self.can_run:
            return self.packed

        def packed(key: jax.Array) -> TrainState:
            state = with_shard_parts(init(key), self.carried, self.mesh)
            return pack_state(self.update, state)

        key, update = jax.random.key(seed), self.update
        if not isinstance(update, StoresApart):
            return compute_in_pieces(packed, key, out_shardings=self.packed_shardings)

        def logical(key: jax.Array) -> TrainState:
            return with_shard_parts(init(key), self.carried, self.mesh)

        params, opt_state = update.puts(self.abstract.params, self.abstract.opt_state)
        kept = jax.tree.map(lambda _: _as_it_is, self.abstract)
        kept = dataclasses.replace(kept, params=params, opt_state=opt_state)
        places = jax.tree.map(lambda x: x.sharding, self.on_devices())
        return self.pack(
            compute_in_pieces(logical, key, out_shardings=places, puts=kept)
        )

    def on_devices(self) -> TrainState:
        """`structs` on the mesh itself, also of what is on CPUs beside it."""

        def own(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            place: Any = struct.sharding
            if place.mesh == self.mesh:
                return struct
            place = NamedSharding(self.mesh, place.spec)
            return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=place)

        return jax.tree.map(own, self.structs())

    def require_devices(self, call: str) -> None:
        """Raise for a call that runs a program on compile-only devices.

        Raises:
          RuntimeError: if the mesh's devices are compile-only.
        """
        if not self.can_run:
            device = self.mesh.devices.flat[0]
            raise RuntimeError(
                f"{call}: this engine's mesh has {self.mesh.size} compile-only "
                f"{device.device_kind}: it can explain() and lower() its step, not "
                "run it. To run, make the mesh from jax.devices()."
            )


def _as_it_is(array: jax.Array) -> jax.Array:
    return array


def _is_read(part: PyTree) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(part))
