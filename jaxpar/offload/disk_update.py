"""How does a step update masters and moments that are on disk?

As the host updates what is in its memory (`jaxpar.offload.cpu_update`), but each piece
is read from files and written to those of another version. The state that compiled
functions carry has none of it; see `jaxpar.offload.on_disk`.

Source: Rajbhandari et al., "ZeRO-Infinity" (2021).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.jaxprs.by_element import ByElement
from jaxpar.mesh import cpu_twin
from jaxpar.offload.cpu_update import CpuUpdate
from jaxpar.offload.disk_files import LeafOnDisk
from jaxpar.offload.disk_pipeline import DiskPipeline
from jaxpar.offload.disk_store import DiskStore
from jaxpar.offload.leaf_work import LeafWork
from jaxpar.offload.on_disk import OnDisk, is_on_disk, is_traced
from jaxpar.offload.rest import (
    by_index,
    bytes_of_leaves,
    described,
    leaves_from_bytes,
    placed_on,
)
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
        masters = [given[leaf, 0] for leaf in range(len(self.host_leaves))]
        if is_traced(leaves):
            copies = list(map(self._cast, masters))
        else:
            self._store.adopt(given)
            copies = list(map(self._copy_of, masters))
        for number in self._keys:
            leaves[number] = self._stand_ins[number]
        masters, opt_state = jax.tree.unflatten(structure, leaves)
        copies = dict(zip(self._copied, copies, strict=True))
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
            name: self._on_mesh(leaves[self.host_leaves[name].param], "device")
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
        return jax.tree.unflatten(structure, map(self._on_mesh, leaves, kinds))

    def compute_params(self, params: PyTree) -> PyTree:
        """See `Update`: of what is on disk the copies."""
        leaves, structure = jax.tree.flatten(params["masters"], is_leaf=is_on_disk)
        for name in self._copied:
            leaves[self.host_leaves[name].param] = params["copies"][name]
        return jax.tree.unflatten(structure, leaves)

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

    def traffic(self) -> HostTraffic:
        """See `HostUpdate`."""
        held = sum(host.num_bytes for host in self.host_leaves.values())
        memory = super().traffic().memory
        return HostTraffic(memory=memory, disk=2 * held, on_disk=held)

    def _updated(
        self,
        parts: Sequence[ByElement],
        args: Sequence[Any],
        scalars: Sequence[list[np.ndarray]],
        copies: Mapping[str, jax.Array],
    ) -> tuple[dict[int, Any], dict[str, jax.Array]]:
        """See `CpuUpdate`; no array is replaced, for another version is written."""
        by_name = {leaf.name: leaf for leaf in self._store.leaves}
        work = [
            LeafWork(
                by_name[part.group.name],
                self._pass(part)[0],
                args[part.group.beside[0]],
                values,
                copies[part.group.name],
            )
            for part, values in zip(parts, scalars, strict=True)
        ]
        pieces = [piece for own in work for piece in own.pieces(self.piece_elements)]
        self._store.update(pieces, self._pipeline)
        return {}, {own.leaf.name: own.new_copy() for own in work}

    def _copy_of(self, master: jax.Array) -> jax.Array:
        """A master in the compute dtype, on the devices."""
        place = self._on_mesh(master.sharding, "device")
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
        return tuple(self.host_leaves)

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
        arrays: dict[int, list[OnDisk]] = {}
        for number, (leaf, _) in self._keys.items():
            arrays.setdefault(leaf, []).append(self._stand_ins[number])
        leaves = []
        for number, (name, host) in enumerate(self.host_leaves.items()):
            place = NamedSharding(self._twin, self._leaf(host).stored_spec)
            leaves.append(LeafOnDisk(number, name, tuple(arrays[number]), place))
        return DiskStore(self.path, leaves)

    @functools.cached_property
    def _pipeline(self) -> DiskPipeline:
        most = max((len(leaf.arrays) for leaf in self._store.leaves), default=1)
        return DiskPipeline(most, self.piece_elements)
