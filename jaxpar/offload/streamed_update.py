"""How does an optimizer step on a state in host memory: a piece of a leaf at a time?

The optimizer's update is traced, and split: what is elementwise runs on pieces that
pass through the device; what is needed of all gradients, such as their norm in a chain,
is computed before. A leaf whose update needs all of it passes through whole.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.jaxprs.by_element import ByElement, LeafGroup, SplitJaxpr, split_by_element
from jaxpar.jaxprs.evaluate import inlined
from jaxpar.offload.chunks import StreamChunks, chunks_of
from jaxpar.offload.host_leaves import HostLeaf
from jaxpar.offload.on_disk import flat_leaves, shapes_of
from jaxpar.offload.stream import stream_in, stream_through
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.memory_kinds import has_memory_kinds, to_device
from jaxpar.step.reduction import PLAIN, Reduction
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.tree import named_leaves
from jaxpar.types import Metrics, Params, PyTree

_HOST = jax.memory.Space.Host


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedUpdate(Update):
    """An update whose masters and moments are in host memory.

    Packed parameters are ``{"masters": tree, "copies": {name: array}}``: in half
    precision each step also writes the copy, on the device, that the next one computes
    with, so that the masters pass through the device once a step.

    Attributes:
      inner: the optimizer's own; its packed state is the logical one.
      spec: what is known of the run.
      host_leaves: parameter name -> what of its state is in host memory.
      piece_elements: most elements of a piece of an array on a device.
      memory_kind: where these are stored; "device" runs the same update there.
      reduction: how the gradients that it gets are reduced.
      remarks: lines among its notes.
    """

    inner: Update
    spec: UpdateSpec
    host_leaves: Mapping[str, HostLeaf]
    piece_elements: int
    memory_kind: str = "pinned_host"
    reduction: Reduction = PLAIN
    fetched: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()
    WHERE: ClassVar[str] = "in host memory"

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`: with copies in the compute dtype, which stay on the device."""
        return {"masters": params, "copies": self._copies_of(params)}, opt_state

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        return params["masters"], opt_state

    def logical_shardings(
        self, params: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        leaves, structure = jax.tree.flatten((params, opt_state))
        offset = len(jax.tree.leaves(params))
        for host in self.host_leaves.values():
            for number in (host.param, *(offset + n for n in host.moments)):
                leaves[number] = leaves[number].with_memory_kind(self.memory_kind)
        return jax.tree.unflatten(structure, leaves)

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        leaves = jax.tree.leaves(params)
        copies = {
            name: leaves[self.host_leaves[name].param].with_memory_kind(
                self._kind_of_copy(name)
            )
            for name in self._copied
        }
        return {"masters": params, "copies": copies}, opt_state

    def compute_params(self, params: PyTree) -> Params:
        """See `Update`."""
        leaves, structure = jax.tree.flatten(params["masters"])
        for name, host in self.host_leaves.items():
            master = leaves[host.param]
            if name in self._copied:
                copy = params["copies"][name]
                leaves[host.param] = self._put_copy(name, copy)
            elif name in self.fetched:
                leaves[host.param] = self._put(master)
            elif name in self.streamed_names:
                leaves[host.param] = self._read(host, master)
            else:
                leaves[host.param] = to_device(master)
        return jax.tree.unflatten(structure, leaves)

    @functools.cached_property
    def streamed_names(self) -> tuple[str, ...]:
        """The parameters whose update goes by pieces.

        In order: a set's is another in each process, and so would their programs be.
        """
        return tuple(part.group.name for part in self._split_shapes.parts)

    @property
    def _copied(self) -> tuple[str, ...]:
        """The parameters of which the device keeps copies in the compute dtype."""
        if self.spec.compute_dtype == jnp.float32:
            return ()
        return tuple(n for n in self.host_leaves if n in self.streamed_names)

    @functools.cached_property
    def _copies_of(self) -> Callable[[Params], dict[str, jax.Array]]:
        def copies(params: Params) -> dict[str, jax.Array]:
            leaves = jax.tree.leaves(params)
            hosts = {name: self.host_leaves[name] for name in self._copied}
            return {
                name: self._put_copy(name, self._read(host, leaves[host.param]))
                for name, host in hosts.items()
            }

        return jax.jit(copies)

    def _read(self, host: HostLeaf, master: jax.Array) -> jax.Array:
        """A master in the compute dtype, on the device."""
        if not self._is_there(master):
            return self._cast(master)
        spec, chunks = self._leaf(host).stored_spec, self._chunks(host)
        copied = functools.partial(stream_in, self._cast, chunks=chunks)
        return self._mapped(copied, (spec,), spec)(self._put(master))

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
        given = grads, params["masters"], opt_state, factor, applied, loss
        args, split = flat_leaves(given), self._split(shapes_of(given))
        outs, scalars = self._of_rest(split, args)
        copies = dict(params["copies"])
        for part, numbers in zip(split.parts, scalars, strict=True):
            name = part.group.name
            kept = [copies[name]] if name in copies else []
            new, kept = self._streamed(part, args, numbers, kept)
            outs.update(zip(part.group.outs, new, strict=True))
            copies |= dict(zip([name], kept, strict=False))
        return self._result(given, outs, copies)

    def _of_rest(
        self, split: SplitJaxpr, args: Sequence[Any]
    ) -> tuple[dict[int, Any], list[list[jax.Array]]]:
        """What is not elementwise, and each part's scalars; see `SplitJaxpr.rest`."""
        outs, scalars = split.rest(to_device(others(split, args)))
        for host in self.host_leaves.values():
            outs |= {n: self._put(outs[n]) for n in self._outs(host) if n in outs}
        return outs, scalars

    def _result(
        self, given: tuple, outs: Mapping[int, Any], copies: dict[str, jax.Array]
    ) -> tuple[PyTree, PyTree, Metrics]:
        """What `apply` returns, from its outputs by number."""
        result = jax.eval_shape(self._step, self._given(given[0]))
        ordered = [outs[number] for number in range(len(outs))]
        masters, *rest = jax.tree.unflatten(jax.tree.structure(result), ordered)
        return {"masters": masters, "copies": copies}, *rest

    def _step(self, given: tuple) -> tuple[PyTree, PyTree, Metrics]:
        *state, factor, applied, loss = given
        return self.inner.apply(*state, factor=factor, applied=applied, loss=loss)

    def _split(self, given: tuple) -> SplitJaxpr:
        """The update, split, for arguments of these shapes and dtypes."""
        shapes, structure = jax.tree.flatten(given)

        def flat(*args: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(self._step(jax.tree.unflatten(structure, args)))

        groups = [self._group(*item) for item in self.host_leaves.items()]
        return split_by_element(inlined(flat, *shapes), groups)

    @functools.cached_property
    def _split_shapes(self) -> SplitJaxpr:
        """The same, for fp32 gradients."""
        return self._split(self._given(self.spec.params))

    def _given(self, grads: PyTree) -> tuple:
        """The shapes of `_step`'s arguments, for gradients."""
        spec, one = self.spec, jax.ShapeDtypeStruct((), jnp.float32)
        yes = jax.ShapeDtypeStruct((), jnp.bool_)
        return shapes_of(grads), spec.params, spec.opt_state, one, yes, one

    def _group(self, name: str, host: HostLeaf) -> LeafGroup:
        num = len(self.spec.leaf_shardings)
        ins = num + host.param, *(2 * num + n for n in host.moments)
        return LeafGroup(name, ins, self._outs(host), (host.param,))

    def _outs(self, host: HostLeaf) -> tuple[int, ...]:
        num = len(self.spec.leaf_shardings)
        return host.param, *(num + n for n in host.moments)

    def _streamed(
        self,
        part: ByElement,
        args: Sequence[Any],
        scalars: Sequence[jax.Array],
        kept: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The new arrays of a leaf, and its copy if one is kept."""
        host = self.host_leaves[part.group.name]
        chunks, spec = self._chunks(host), self._leaf(host).stored_spec

        def step(stored: list, beside: list, kept: list, scalars: list) -> tuple:
            def new(pieces: Sequence, near: Sequence) -> tuple[list, list]:
                made = part([*pieces, *near], scalars)
                return made, [self._cast(made[0])] if kept else []

            return stream_through(new, stored, beside, chunks, kept)

        stored = [self._put(args[number]) for number in part.group.ins]
        beside = [args[number] for number in part.group.beside]
        given = stored, beside, list(kept), list(scalars)
        return self._mapped(step, (spec, spec, spec, P()), spec)(*given)

    def _mapped(self, fn: Callable, ins: tuple, outs: Any) -> Callable:
        return jax.shard_map(
            fn, mesh=self.spec.mesh, in_specs=ins, out_specs=outs, check_vma=False
        )

    def _leaf(self, host: HostLeaf) -> LeafSharding:
        return self.spec.leaf_shardings[host.param]

    def _chunks(self, host: HostLeaf) -> StreamChunks:
        leaf = self._leaf(host)
        place = NamedSharding(self.spec.mesh, leaf.stored_spec)
        return chunks_of(place.shard_shape(leaf.shape), self.piece_elements)

    def _put(self, x: jax.Array) -> jax.Array:
        # On compile-only GPUs it is in host memory, and jax does not know it.
        return jax.device_put(x, _HOST) if self.memory_kind == "pinned_host" else x

    def _put_copy(self, name: str, copy: jax.Array) -> jax.Array:
        """A copy, or its new value, where copies of this parameter are."""
        return self._put(copy) if name in self.fetched else copy

    def _kind_of_copy(self, name: str) -> str:
        return self.memory_kind if name in self.fetched else "device"

    def _is_there(self, x: jax.Array) -> bool:
        """Whether a traced array is in host memory, as far as jax knows."""
        if not has_memory_kinds(self.spec.mesh):
            return self.memory_kind == "pinned_host"
        return jax.typeof(x).memory_space == _HOST

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.spec.compute_dtype)

    def with_shardings(
        self, leaf_shardings: tuple[LeafSharding, ...]
    ) -> "StreamedUpdate":
        """See `Update`."""
        return dataclasses.replace(
            self,
            inner=self.inner.with_shardings(leaf_shardings),
            spec=dataclasses.replace(self.spec, leaf_shardings=leaf_shardings),
        )

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        whole = self._split_shapes.whole
        num = len(named_leaves(self.spec.params))
        lines = [
            f"offload: the masters and moments of {len(self.host_leaves)} of {num} "
            f"parameters are {self.WHERE}."
        ]
        if whole:
            name, why = next(iter(whole.items()))
            lines.append(
                f"offload: the update of {len(whole)} of them needs whole leaves, "
                f"which pass through the device as such ({name}: {why})."
            )
        return (*self.inner.notes(), *lines, *self.remarks)


def others(split: SplitJaxpr, args: Sequence[Any]) -> dict[int, Any]:
    """Number of an argument -> the argument, of those that are not the parts' own."""
    own = {number for part in split.parts for number in part.group.ins}
    return {number: x for number, x in enumerate(args) if number not in own}
