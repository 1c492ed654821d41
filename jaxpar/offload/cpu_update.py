"""How does the host compute the update of the state that it holds (CPU-Adam)?

A step is two compiled programs. The first sends the gradients to the host, whose cores
update masters and moments in one pass and write the parameters in the compute dtype,
which are sent up while the next leaf is computed. The second updates what is left.

Source: Ren et al., "ZeRO-Offload" (2021).
"""

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.filesize import decimal

from jaxpar.jaxprs.by_element import ByElement, SplitJaxpr
from jaxpar.jaxprs.evaluate import shape_of
from jaxpar.mesh import are_present
from jaxpar.offload.c_code import NotInCError, c_code
from jaxpar.offload.host_leaves import HostLeaf
from jaxpar.offload.native import Pass, compiled, cores
from jaxpar.offload.on_disk import flat_leaves, is_on_disk
from jaxpar.offload.stream import stream_sum
from jaxpar.offload.streamed_update import StreamedUpdate, others
from jaxpar.offload.xla_pass import xla_pass
from jaxpar.sharding.memory_kinds import to_device
from jaxpar.sharding.rules import axes_of
from jaxpar.step.update import HostTraffic, HostUpdate
from jaxpar.types import Metrics, PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class CpuUpdate(StreamedUpdate, HostUpdate):
    """An update of masters and moments in host memory, by the host; a `HostUpdate`.

    Attributes:
      in_place: whether the arrays in host memory are overwritten. JAX's arrays are not,
        but on the CPU platform NumPy may see the same memory, and there new ones are
        made. None for what the mesh's platform needs.
      layers_on_disk: whether the parameters that loops fetch are on disk.
    """

    in_place: bool | None = None
    layers_on_disk: bool = False
    grads_leave_early: bool = True
    delay_after: int | None = None

    def grads_shardings(self, params: PyTree) -> PyTree:
        """See `HostUpdate`."""
        leaves, structure = jax.tree.flatten(params)
        leaves = [place.with_memory_kind("device") for place in leaves]
        for name in self.streamed_names:
            number = self.host_leaves[name].param
            leaves[number] = leaves[number].with_memory_kind(self.memory_kind)
        return jax.tree.unflatten(structure, leaves)

    def norm(self, grads: PyTree) -> jax.Array:
        """See `Update`; gradients in host memory are read a piece at a time."""
        leaves, structure = jax.tree.flatten(grads)
        total = jnp.float32(0)
        for name in self.streamed_names:
            host = self.host_leaves[name]
            if jax.typeof(leaves[host.param]).memory_space == jax.memory.Space.Host:
                total += self._sum_of_squares(host, leaves[host.param])
                leaves[host.param] = jnp.float32(0)
        others = self.reduction.norm(jax.tree.unflatten(structure, leaves))
        return jnp.sqrt(total + others**2)

    def _sum_of_squares(self, host: HostLeaf, grad: jax.Array) -> jax.Array:
        spec, chunks = self._leaf(host).stored_spec, self._chunks(host)
        axes = tuple(axis for entry in spec for axis in axes_of(entry))

        def summed(grad: jax.Array) -> jax.Array:
            total = stream_sum(lambda x: jnp.sum(jnp.square(x)), grad, chunks)
            return jax.lax.psum(total, axes) if axes else total

        return self._mapped(summed, (spec,), P())(grad)

    def on_host(
        self,
        grads: PyTree,
        params: PyTree,
        opt_state: PyTree,
        *,
        factor: jax.Array,
        applied: jax.Array,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """See `HostUpdate`."""
        known = {"factor": factor, "applied": applied, "loss": loss}
        return self.begin(grads, params, opt_state, **known)()

    def begin(
        self, grads: PyTree, params: PyTree, opt_state: PyTree, **known: jax.Array
    ) -> Callable[[], tuple[PyTree, PyTree, PyTree]]:
        """See `HostUpdate`: the devices compute the scalars."""
        if not bool(known["applied"]):
            return lambda: (grads, params, opt_state)
        state = params["masters"], opt_state
        rest = known["factor"], known["applied"], known["loss"]
        args = flat_leaves((grads, *state, *rest))
        split, scalars_of = self._split_of(grads)
        scalars = [
            [np.asarray(number) for number in numbers]
            for numbers in scalars_of(others(split, args))
        ]

        def on_host() -> tuple[PyTree, PyTree, PyTree]:
            new, copies = self._updated(split.parts, args, scalars, params["copies"])
            leaves, structure = jax.tree.flatten(state, is_leaf=is_on_disk)
            offset = len(jax.tree.leaves(grads))
            for number, array in new.items():
                leaves[number - offset] = array
            masters, changed = jax.tree.unflatten(structure, leaves)
            return grads, {"masters": masters, "copies": copies}, changed

        return on_host

    def _updated(
        self,
        parts: Sequence[ByElement],
        args: Sequence[Any],
        scalars: Sequence[list[np.ndarray]],
        copies: Mapping[str, jax.Array],
    ) -> tuple[dict[int, Any], dict[str, jax.Array]]:
        """The new arrays, by the numbers of those that they replace, and the copies."""
        found, copies = {}, dict(copies)
        for part, values in zip(parts, scalars, strict=True):
            name, group = part.group.name, part.group
            arrays = [args[number] for number in (*group.ins, *group.beside)]
            new, copy = self._computed(part, arrays, values, copies.get(name))
            found.update(zip(group.ins, new, strict=True))
            copies |= {} if copy is None else {name: copy}
        return found, copies

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
        """See `Update`: what `on_host` has not updated."""
        given = grads, params["masters"], opt_state, factor, applied, loss
        args, (split, _) = flat_leaves(given), self._split_of(grads)
        outs = self._of_rest(split, args)[0]
        for part in split.parts:
            pairs = zip(part.group.outs, part.group.ins, strict=True)
            outs |= {out: self._kept(args[number]) for out, number in pairs}
        copies = {n: self._put_copy(n, x) for n, x in params["copies"].items()}
        return self._result(given, outs, copies)

    def _kept(self, leaf: Any) -> Any:
        """A leaf that `on_host` has updated."""
        return leaf if is_on_disk(leaf) else self._put(leaf)

    def _split_of(self, grads: PyTree) -> tuple[SplitJaxpr, Callable[..., Any]]:
        """The update split, for these dtypes, and what computes its scalars."""
        given = self._given(grads)
        dtypes = tuple(x.dtype for x in jax.tree.leaves(given[0]))
        if dtypes not in self._splits:
            split = self._split(given)
            scalars = jax.jit(lambda x: split.rest(to_device(x))[1])
            self._splits[dtypes] = split, scalars
        return self._splits[dtypes]

    @functools.cached_property
    def _splits(self) -> dict[tuple, tuple[SplitJaxpr, Callable[..., Any]]]:
        return {}

    @functools.cached_property
    def _passes(self) -> dict[tuple[str, Any], tuple[Pass, str]]:
        return {}

    def pass_of(self, part: ByElement) -> tuple[Pass, str]:
        """The function that computes a leaf's update, and what it is made by."""
        name = part.group.name
        key = name, tuple(shape_of(var).dtype for var in part.inputs)
        if key not in self._passes:
            copy = self.spec.compute_dtype if self.makes_copy(name) else None
            self._passes[key] = _made(part, copy)
        return self._passes[key]

    @property
    def parts(self) -> tuple[ByElement, ...]:
        """What the host computes, of each leaf."""
        return self._split_shapes.parts

    def makes_copy(self, name: str) -> bool:
        """Whether the pass over a leaf writes a copy in the compute dtype."""
        return name in self._copied

    def _computed(
        self,
        part: ByElement,
        arrays: Sequence[jax.Array],
        scalars: Sequence[np.ndarray],
        copy: jax.Array | None,
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """A leaf's new arrays, and its copy on the devices if there is one."""
        run, _ = self.pass_of(part)
        on_cpu = self.spec.mesh.devices.flat[0].platform == "cpu"
        in_place = not on_cpu if self.in_place is None else self.in_place
        kept, shards = len(part.group.ins), []
        for same in zip(*(x.addressable_shards for x in arrays), strict=True):
            jax.block_until_ready([shard.data for shard in same])
            ins = [_host_view(shard.data, in_place) for shard in same]
            outs = ins[:kept] if in_place else [np.empty_like(x) for x in ins[:kept]]
            if copy is not None:
                outs = [*outs, np.empty(ins[0].shape, self.spec.compute_dtype)]
            run([*ins, *outs], scalars)
            shards.append((same, outs))
        new = list(arrays[:kept])
        if not in_place:
            new = [
                _assembled(new[n], [(same[n].data, outs[n]) for same, outs in shards])
                for n in range(kept)
            ]
        if copy is None:
            return new, None
        on_device = [x.data for x in copy.addressable_shards]
        pairs = zip(on_device, (outs[-1] for _, outs in shards), strict=True)
        return new, _assembled(copy, list(pairs))

    def traffic(self) -> HostTraffic:
        """See `HostUpdate`."""
        return HostTraffic(memory=self._moved_bytes)

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        parts = self._split_shapes.parts
        if not parts:
            return super().notes()
        line = (
            f"offload: the host computes the update of {len(parts)} parameters; for "
            f"each device it reads and writes {decimal(self._moved_bytes)} a step"
        )
        if are_present(self.spec.mesh):
            made_by = sorted({self.pass_of(part)[1] for part in parts})
            line += f", on {cores()} cores, by {'; '.join(made_by)}"
        return (*super().notes(), f"{line}.", *self._fetched_notes())

    def _fetched_notes(self) -> tuple[str, ...]:
        if not self.fetched:
            return ()
        where = "on disk" if self.layers_on_disk else "in host memory"
        return (
            f"offload: {len(self.fetched)} parameters are {where}; loops fetch each "
            "layer where they use it, at every ZeRO stage, in both passes.",
        )

    @property
    def _moved_bytes(self) -> int:
        """What one pass reads and writes in host memory, for a device."""
        moved = 0
        for part in self._split_shapes.parts:
            name, own = part.group.name, len(part.group.ins)
            sizes = [shape_of(var).dtype.itemsize for var in part.inputs]
            copy = jnp.dtype(self.spec.compute_dtype).itemsize
            each = sum(sizes) + sum(sizes[:own]) + copy * self.makes_copy(name)
            moved += each * math.prod(self._chunks(self.host_leaves[name]).shape)
        return moved


def _made(part: ByElement, copy: Any | None) -> tuple[Pass, str]:
    try:
        return compiled(c_code(part, copy)), "compiled C code"
    except (NotInCError, OSError) as error:
        return xla_pass(part, copy), f"XLA's CPU backend, for in C: {error}"


def _host_view(array: jax.Array, writable: bool) -> np.ndarray:
    """The memory of an array in host memory, on one device."""
    if not writable:
        return np.ascontiguousarray(np.asarray(array))
    size = array.size * array.dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def _assembled(
    like: jax.Array, shards: Sequence[tuple[jax.Array, np.ndarray]]
) -> jax.Array:
    """An array of new shards, each put where an old one is."""
    placed = [jax.device_put(new, old.sharding) for old, new in shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed)
