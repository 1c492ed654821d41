"""How does a step update masters and moments that are on disk?

As the host updates what is in its memory (`jaxpar.offload.cpu_update`), but each piece
is read from files and written to those of another version. The state that compiled
functions carry has none of it; see `jaxpar.offload.on_disk`.

Source: Rajbhandari et al., "ZeRO-Infinity" (2021).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.jaxprs.by_element import ByElement
from jaxpar.mesh import are_present, cpu_twin
from jaxpar.offload.cpu_update import CpuUpdate
from jaxpar.offload.disk_files import LeafOnDisk
from jaxpar.offload.disk_pipeline import DiskPipeline
from jaxpar.offload.disk_store import DiskStore
from jaxpar.offload.layer_files import LayerFiles
from jaxpar.offload.leaf_work import LayersWork, LeafWork
from jaxpar.offload.on_disk import OnDisk, is_on_disk, is_traced, shapes_of
from jaxpar.offload.rest import (
    by_index,
    bytes_of_leaves,
    described,
    leaves_from_bytes,
    placed_on,
)
from jaxpar.step.layer_store import raise_failure
from jaxpar.step.state import TrainState
from jaxpar.step.update import HostTraffic, StoresApart
from jaxpar.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class DiskUpdate(CpuUpdate, StoresApart):
    """An update of masters and moments on disk, by the host; a `StoresApart`.

    Attributes:
      path: the folder of their files.
    """

    path: Path = Path()
    WHERE: ClassVar[str] = "on disk"

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`: what is on disk is written there, and is in no array."""
        leaves, structure = jax.tree.flatten((params, opt_state))
        given = {key: leaves[number] for number, key in self._keys.items()}
        own = {name: leaves[self.host_leaves[name].param] for name in self._copied}
        if is_traced(leaves):
            copies = {name: self._cast(master) for name, master in own.items()}
        else:
            self._store.adopt(given)
            copies = {name: self._copy_of(name, x) for name, x in own.items()}
        for number in self._keys:
            leaves[number] = self._stand_ins[number]
        masters, opt_state = jax.tree.unflatten(structure, leaves)
        return {"masters": masters, "copies": copies}, opt_state

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`: what is on disk is read as it is used, through maps of files.

        A traced function has no use of it, and sees NaN.
        """

        def logical(number: int, leaf: Any) -> Any:
            if not is_on_disk(leaf):
                return leaf
            if traced:
                return jnp.full(leaf.shape, jnp.nan).astype(leaf.dtype)
            return self._store.array(*self._keys[number])

        state, traced = (params["masters"], opt_state), is_traced((params, opt_state))
        leaves, structure = jax.tree.flatten(state, is_leaf=is_on_disk)
        leaves = [logical(number, leaf) for number, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, leaves)

    def puts(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `StoresApart`."""
        leaves, structure = jax.tree.flatten((params, opt_state))
        found: list[Any] = [lambda array: array] * len(leaves)
        for number, key in self._keys.items():
            found[number] = functools.partial(self._store.put, *key)
        return jax.tree.unflatten(structure, found)

    def logical_shardings(
        self, params: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """See `Update`: what is on disk is seen on CPU devices."""
        leaves, structure = jax.tree.flatten((params, opt_state))
        for number in self._keys:
            place = leaves[number]
            if isinstance(place, NamedSharding):
                leaves[number] = NamedSharding(self._twin, place.spec)
        return jax.tree.unflatten(structure, leaves)

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        leaves, structure = jax.tree.flatten((params, opt_state))
        copies = {
            name: self._on_mesh(
                leaves[self.host_leaves[name].param], self._kind_of_copy(name)
            )
            for name in self._copied
        }
        for number in self._keys:
            leaves[number] = self._stand_ins[number]
        masters, opt_state = jax.tree.unflatten(structure, leaves)
        return {"masters": masters, "copies": copies}, opt_state

    def grads_shardings(self, params: PyTree) -> PyTree:
        """See `HostUpdate`."""
        leaves, structure = jax.tree.flatten(params)
        own = {host.param for host in self.host_leaves.values()}
        kinds = [self.memory_kind if n in own else "device" for n in range(len(leaves))]
        places = list(map(self._on_mesh, leaves, kinds))
        for number in self.layer_stores():
            replicated = self._on_mesh(leaves[number], "device")
            if isinstance(replicated, NamedSharding):
                replicated = NamedSharding(self.spec.mesh, P())
            places[number] = replicated
        return jax.tree.unflatten(structure, places)

    def layer_stores(self) -> Mapping[int, LayerFiles]:
        """See `Update`."""
        return self._layers

    def compute_params(self, params: PyTree) -> PyTree:
        """See `Update`: of what is on disk the copies, or the numbers of layers."""
        leaves, structure = jax.tree.flatten(params["masters"], is_leaf=is_on_disk)
        for number in self.layer_stores():
            leaves[number] = jnp.arange(leaves[number].shape[0], dtype=jnp.int32)
        for name in self._copied:
            copy = self._put_copy(name, params["copies"][name])
            leaves[self.host_leaves[name].param] = copy
        return jax.tree.unflatten(structure, leaves)

    def norm(self, grads: PyTree) -> jax.Array:
        """See `Update`; of what loops fetch there are sums of squares."""
        leaves, structure = jax.tree.flatten(grads)
        total = jnp.float32(0)
        for number in self.layer_stores():
            total += jnp.sum(leaves[number])
            leaves[number] = jnp.float32(0)
        others = super().norm(jax.tree.unflatten(structure, leaves))
        return jnp.sqrt(total + others**2)

    def finish_step(self, state: TrainState) -> None:
        """See `HostUpdate`: the step is whole once what steps carry is written too."""
        step = int(state.step)
        if self._store.is_committed(step):
            return
        logical = dataclasses.replace(state, params=state.params["masters"])
        rest = bytes_of_leaves(dataclasses.replace(logical, frozen={}))

        def fixed() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
            return bytes_of_leaves({"frozen": logical.frozen}), described(logical)

        self._store.commit(step, rest, fixed)

    def whole_step(self) -> int | None:
        """See `StoresApart`."""
        whole = self._store.whole
        return whole[-1].step if whole else None

    def recovered(self, structs: TrainState) -> TrainState:
        """See `StoresApart`."""
        step = self._store.whole[-1]
        leaves, structure = jax.tree.flatten((structs.params, structs.opt_state))
        for number in self._keys:
            leaves[number] = self._stand_ins[number]
        params, opt_state = jax.tree.unflatten(structure, leaves)
        beside = dataclasses.replace(structs, params=params, opt_state=opt_state)
        stored = self._store.read_rest(step, described(beside))
        state = leaves_from_bytes(beside, stored)
        self._store.begin_from(step)
        packed = {"masters": state.params, "copies": {}}
        params, opt_state = self.unpack(packed, state.opt_state)
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def require_by_element(self) -> None:
        """Refuse an optimizer that needs whole leaves.

        Raises:
          ValueError: if it does; it says of which leaf, and why.
        """
        for name, why in self._split_shapes.whole.items():
            raise ValueError(
                "offload: optimizer='disk' updates pieces of leaves, but it needs "
                f"all of {name}: {why}. Use one that works by element, such as Adam or "
                "Lion, or Offload(optimizer='host')."
            )
        read = self._split_shapes.reads
        for number, store in self.layer_stores().items():
            if number in read:
                raise ValueError(
                    "offload: params='disk': the optimizer needs all gradients of "
                    f"{store.leaf.name} at once (as optax.clip_by_global_norm does), "
                    "but they are on disk, layer by layer. Use clip_norm= of "
                    "jaxpar.initialize to clip, or params='host'."
                )

    def traffic(self) -> HostTraffic:
        """See `HostUpdate`."""
        held = sum(host.num_bytes for host in self.host_leaves.values())
        copies, grads = 0, 0
        for number in self.layer_stores():
            leaf = self.spec.leaf_shardings[number]
            size = math.prod(leaf.shape) // leaf.ways_stored
            size *= jnp.dtype(self.spec.compute_dtype).itemsize
            copies += size * self._has_copy(leaf.name)
            grads += size
        # Layers are read in two passes; their gradients are written and read.
        moved = 2 * held + copies + 2 * grads + 2 * grads
        return HostTraffic(
            memory=super().traffic().memory,
            disk=moved,
            on_disk=2 * (held + copies) + grads,
        )

    def _updated(
        self,
        parts: Sequence[ByElement],
        args: Sequence[Any],
        scalars: Sequence[list[np.ndarray]],
        copies: Mapping[str, jax.Array],
    ) -> tuple[dict[int, Any], dict[str, jax.Array]]:
        """See `CpuUpdate`; no array is replaced, for another version is written."""
        leaves, stores = self._store.leaves, self.layer_stores()
        by_name = {leaf.name: leaf for leaf in leaves}
        work: list[LeafWork | LayersWork] = []
        for part, values in zip(parts, scalars, strict=True):
            name, number = part.group.name, part.group.beside[0]
            own, run = by_name[name], self.pass_of(part)[0]
            if number in stores:
                files = stores[number]
                assert files.dtype is not None, "a gradient was traced"
                given = own, run, files.grads, files.dtype, values
                work.append(LayersWork(*given))
            else:
                work.append(LeafWork(own, run, args[number], values, copies[name]))
        pieces = [piece for own in work for piece in own.pieces(self.piece_elements)]
        self._store.update(pieces, self._pipeline)
        return {}, {n: x for own in work for n, x in own.new_copies().items()}

    def begin(
        self, grads: PyTree, params: PyTree, opt_state: PyTree, **known: jax.Array
    ) -> Callable[[], tuple[PyTree, PyTree, PyTree]]:
        """See `HostUpdate`."""
        jax.block_until_ready(known)
        raise_failure(self.layer_stores().values())
        return super().begin(grads, params, opt_state, **known)

    def _given(self, grads: PyTree) -> tuple:
        """The shapes of `_step`'s arguments; of gradients on disk as they are there."""
        leaves, structure = jax.tree.flatten(shapes_of(grads))
        for number, store in self.layer_stores().items():
            shape = self.spec.leaf_shardings[number].shape
            dtype = store.dtype or jnp.float32
            leaves[number] = jax.ShapeDtypeStruct(shape, dtype)
        return super()._given(jax.tree.unflatten(structure, leaves))

    def makes_copy(self, name: str) -> bool:
        """See `CpuUpdate`."""
        return name in self._copied or self._has_copy(name)

    def _has_copy(self, name: str) -> bool:
        """Whether a copy in the compute dtype is on disk."""
        fetched = self.layers_on_disk and name in self.fetched
        return fetched and self.spec.compute_dtype != jnp.float32

    def _copy_of(self, name: str, master: jax.Array) -> jax.Array:
        """A master in the compute dtype, where copies of this parameter are."""
        place = self._on_mesh(master.sharding, self._kind_of_copy(name))
        pieces = {
            index: np.array(shards[0].data, self.spec.compute_dtype)
            for index, shards in by_index(master).items()
        }
        return placed_on(place, master.shape, pieces)

    def _on_mesh(self, place: Any, kind: str) -> Any:
        """A sharding, or a memory kind alone, on the run's own devices."""
        if isinstance(place, NamedSharding) and place.mesh != self.spec.mesh:
            return NamedSharding(self.spec.mesh, place.spec, memory_kind=kind)
        return place.with_memory_kind(kind)

    @property
    def _copied(self) -> tuple[str, ...]:
        there = self.fetched if self.layers_on_disk else ()
        return tuple(name for name in self.host_leaves if name not in there)

    @functools.cached_property
    def _keys(self) -> dict[int, tuple[int, int]]:
        """Number of a leaf of the parameters and the optimizer's state -> the number of
        the leaf on disk, and of its array."""
        offset, keys = len(self.spec.leaf_shardings), {}
        for leaf, host in enumerate(self.host_leaves.values()):
            for array, number in enumerate(
                (host.param, *(offset + n for n in host.moments))
            ):
                keys[number] = leaf, array
        return keys

    @functools.cached_property
    def _twin(self) -> Mesh:
        return cpu_twin(self.spec.mesh)

    @functools.cached_property
    def _stand_ins(self) -> dict[int, OnDisk]:
        leaves = jax.tree.leaves((self.spec.params, self.spec.opt_state))
        return {n: OnDisk(leaves[n].shape, leaves[n].dtype) for n in self._keys}

    @functools.cached_property
    def _store(self) -> DiskStore:
        return DiskStore(self.path, self._leaves_on_disk)

    @functools.cached_property
    def _leaves_on_disk(self) -> list[LeafOnDisk]:
        arrays: dict[int, list[OnDisk]] = {}
        for number, (leaf, _) in self._keys.items():
            arrays.setdefault(leaf, []).append(self._stand_ins[number])
        leaves = []
        for number, (name, host) in enumerate(self.host_leaves.items()):
            place = NamedSharding(self._twin, self._leaf(host).stored_spec)
            own, copy = tuple(arrays[number]), None
            if self._has_copy(name):
                copy = OnDisk(own[0].shape, np.dtype(self.spec.compute_dtype))
            leaves.append(LeafOnDisk(number, name, own, place, copy))
        return leaves

    @functools.cached_property
    def _pipeline(self) -> DiskPipeline:
        # And the gradient.
        most = max((len(leaf.stored) + 1 for leaf in self._store.leaves), default=1)
        return DiskPipeline(most, self.piece_elements)

    @functools.cached_property
    def _layers(self) -> dict[int, LayerFiles]:
        if not self.layers_on_disk:
            return {}
        devices = list(self._twin.devices.flat)
        return {
            self.host_leaves[leaf.name].param: LayerFiles(
                leaf,
                devices,
                lambda: self._store,
                can_run=are_present(self.spec.mesh),
            )
            for leaf in self._leaves_on_disk
            if leaf.name in self.fetched
        }
