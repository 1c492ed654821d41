"""How is each leaf stored, and how computed on: ZeRO as two specs per leaf.

A ZeRO stage is a row of a table, not a code path (`ZERO_STAGES`). A leaf has a
`LeafSharding`: the spec it is stored at and the spec it is computed at. At ZeRO stages
1-3 a leaf is stored sharded over data, pipe *and* tensor, whatever its compute spec, so
the state of Adam takes 12 Psi / N bytes.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", sections 5 and 7. Differs: parameters are stored sharded at ZeRO
stages 1 and 2 too (the fp32 masters are the parameters), and are gathered once a step.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import AXES, DATA, PIPE, TENSOR
from jaxpar.sharding.rules import Spec, axes_of

WHOLE_BELOW_BYTES = 1024
"""Leaves smaller than this are replicated over data."""

LARGE_BYTES = 1 << 20
"""A leaf of at least this many bytes must be sharded or be in `allow_whole`."""


@dataclasses.dataclass(frozen=True)
class ZeroStage:
    """One row of the ZeRO table.

    Attributes:
      number: 0, 1, 2 or 3.
      stored: parameters and optimizer state are stored "whole" (replicated) or
        "sharded" over data.
      gather: parameters are gathered once a "step", at every "use", or "never".
      reduce: gradients are reduced over data once a "step" or every "microbatch".
    """

    number: int
    stored: Literal["whole", "sharded"]
    gather: Literal["never", "step", "use"]
    reduce: Literal["step", "microbatch"]


ZERO_STAGES = (
    ZeroStage(0, stored="whole", gather="never", reduce="step"),
    ZeroStage(1, stored="sharded", gather="step", reduce="step"),
    ZeroStage(2, stored="sharded", gather="step", reduce="microbatch"),
    ZeroStage(3, stored="sharded", gather="use", reduce="microbatch"),
)


def zero_stage(number: int) -> ZeroStage:
    """Look up a ZeRO stage.

    Raises:
      ValueError: if `number` is not 0, 1, 2 or 3.

    Example:
      >>> zero_stage(3).gather
      'use'
    """
    if type(number) is not int or number not in range(len(ZERO_STAGES)):
        raise ValueError(
            f"zero={number!r} must be 0 (replicate), 1 (shard the state), 2 (and the "
            "gradients) or 3 (and gather parameters at use)."
        )
    return ZERO_STAGES[number]


@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """The shardings of one leaf: as stored, and as computed on.

    Where data and another axis split the same dim, that dim is two dims in the leaf's
    *view*: the other axis splits the first, data the second. With data manual the leaf
    is then gathered over data on every tensor shard, and tensor shards do not move.

    Attributes:
      name: the leaf's path.
      shape: its logical shape.
      compute: one mesh axis, several, or None per dim, while it is computed on.
      data_dim: the dim that data splits in storage; None if replicated over data.
      placed: by dim, which of pipe and tensor split it in storage.
      ways: (data, pipe, tensor) sizes of the mesh.
      why: the reason, for people.

    Example: a (64, 17) kernel on data 4 x tensor 2, its rows split by tensor. 4 does
      not divide 17, so data splits the rows too: 8 devices store 8 rows each. In the
      view (2, 32, 17), tensor splits dim 0 and data dim 1. An all-gather over data
      along dim 1 gives each device the 32 rows of its tensor shard.

      >>> leaf = LeafSharding(
      ...     "w", (64, 17), ("tensor", None), 0, (("tensor",), ()), (4, 1, 2), ""
      ... )
      >>> tuple(leaf.stored_spec)
      (('tensor', 'data'), None)
      >>> leaf.view_shape, tuple(leaf.view_spec())
      ((2, 32, 17), ('tensor', 'data', None))
    """

    name: str
    shape: tuple[int, ...]
    compute: Spec
    data_dim: int | None
    placed: tuple[tuple[str, ...], ...]
    ways: tuple[int, int, int]
    why: str

    def dim_of(self, axis: str) -> int | None:
        """The dim that pipe or tensor splits in storage; None if it splits none."""
        dims = (dim for dim, axes in enumerate(self.placed) if axis in axes)
        return next(dims, None)

    @property
    def shares_dim(self) -> bool:
        """Whether data and another axis split the same dim in storage."""
        return self.data_dim is not None and bool(self.placed[self.data_dim])

    @property
    def ways_computed(self) -> int:
        """Number of shards while computed on."""
        sizes: dict[str, int] = dict(zip(AXES, self.ways, strict=True))
        return math.prod(sizes[a] for axes in self.compute for a in axes_of(axes))

    @property
    def ways_stored(self) -> int:
        """Number of shards in storage."""
        sizes: dict[str, int] = dict(zip(AXES, self.ways, strict=True))
        others = math.prod(sizes[axis] for axes in self.placed for axis in axes)
        return others * (1 if self.data_dim is None else sizes[DATA])

    @property
    def stored_spec(self) -> P:
        """The storage spec, over the logical shape."""
        entries = list(self.placed)
        if self.data_dim is not None:
            entries[self.data_dim] = (*entries[self.data_dim], DATA)
        return P(*map(_entry, entries))

    @property
    def compute_spec(self) -> P:
        """The compute spec, over the logical shape."""
        return P(*self.compute)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The logical shape, with a dim that data shares as two dims."""
        dim = self.data_dim
        if dim is None or not self.shares_dim:
            return self.shape
        ways = math.prod(self.ways[AXES.index(axis)] for axis in self.placed[dim])
        return (
            *self.shape[:dim],
            ways,
            self.shape[dim] // ways,
            *self.shape[dim + 1 :],
        )

    @property
    def view_data_dim(self) -> int | None:
        """The dim of the view that data splits."""
        if self.data_dim is None:
            return None
        return self.data_dim + self.shares_dim

    def view_spec(self, *, data: bool = True, placed: bool = True) -> P:
        """The storage spec over the view: of data, of pipe and tensor, or of all."""
        entries = self.in_view(self.placed if placed else [()] * len(self.shape))
        if data and self.view_data_dim is not None:
            entries[self.view_data_dim] = DATA
        return P(*entries)

    def in_view(self, axes: Sequence[tuple[str, ...]]) -> list[Any]:
        """Make a spec's entries over the view from axes by logical dim."""
        entries = [_entry(names) for names in axes]
        if self.data_dim is not None and self.shares_dim:
            entries.insert(self.data_dim + 1, None)
        return entries

    def without_leading_dim(self) -> "LeafSharding | None":
        """The sharding of one slice along dim 0; None if an axis splits that dim."""
        if self.data_dim == 0 or self.placed[0] or self.compute[0] is not None:
            return None
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            compute=self.compute[1:],
            data_dim=None if self.data_dim is None else self.data_dim - 1,
            placed=self.placed[1:],
        )


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes if len(axes) > 1 else next(iter(axes), None)


def shard_leaves(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    compute: Mapping[str, Spec],
    zero: ZeroStage,
    sizes: Mapping[str, int],
    allow_whole: Sequence[str] = (),
    regrouped: Collection[str] = (),
) -> dict[str, LeafSharding]:
    """Choose the sharding of every leaf, for a ZeRO stage and a mesh.

    Args:
      leaves: leaf name -> shape and dtype.
      compute: leaf name -> its compute spec.
      zero: the row of the ZeRO table.
      sizes: mesh axis -> devices on it.
      allow_whole: path patterns of large leaves that may be replicated over data.
      regrouped: leaves whose dim 0 is reordered over pipe to compute: no axis splits
        that dim in storage, and pipe has a dim of its own.

    Returns:
      leaf name -> sharding.

    Raises:
      ValueError: if a large leaf cannot be sharded over data and is not in
        `allow_whole`, or that is one string, or a pattern of it matches nothing.
    """
    if isinstance(allow_whole, str):
        raise ValueError(
            f"allow_whole={allow_whole!r} must be a tuple of path patterns; pass "
            f"allow_whole=({allow_whole!r},)."
        )
    for pattern in allow_whole:
        if not any(tree.matches(pattern, name) for name in leaves):
            raise ValueError(
                f"allow_whole: {pattern!r} matches no parameter; known paths: "
                f"{', '.join(list(leaves)[:8])}.{tree.near_match(pattern, leaves)}"
            )
    ways = (sizes[DATA], sizes[PIPE], sizes[TENSOR])
    leaf_shardings = {}
    for name, leaf in leaves.items():
        sharded = _shard_leaf(
            name, leaf, compute[name], zero, ways, regroups=name in regrouped
        )
        allowed = any(tree.matches(pattern, name) for pattern in allow_whole)
        if _is_too_large_to_stay_whole(sharded, leaf, zero) and not allowed:
            raise ValueError(
                f"zero={zero.number}: {name} (shape {leaf.shape}, "
                f"{tree.num_bytes(leaf) / 2**20:.1f} MiB) has no dim that data="
                f"{ways[0]} divides, so every device would hold all of it. Pad a dim "
                f"to a multiple of {ways[0]}, change the mesh, or pass "
                f"allow_whole=({name!r},)."
            )
        leaf_shardings[name] = sharded
    return leaf_shardings


def _is_too_large_to_stay_whole(
    sharded: LeafSharding, leaf: jax.ShapeDtypeStruct, zero: ZeroStage
) -> bool:
    return (
        zero.stored == "sharded"
        and sharded.ways[0] > 1
        and sharded.data_dim is None
        and tree.num_bytes(leaf) >= LARGE_BYTES
    )


def _shard_leaf(
    name: str,
    leaf: jax.ShapeDtypeStruct,
    compute: Spec,
    zero: ZeroStage,
    ways: tuple[int, int, int],
    *,
    regroups: bool,
) -> LeafSharding:
    shape = tuple(leaf.shape)
    placed = tuple(map(axes_of, compute))
    if zero.stored == "whole":
        why = "ZeRO stage 0 replicates over data"
        if regroups:
            dims = _best_dims(shape, placed, (1, ways[1], 1), regroups=True)
            placed = _placed(shape, dims)
        return LeafSharding(name, shape, compute, None, placed, ways, why)
    size_bytes = math.prod(shape) * np.dtype(leaf.dtype).itemsize
    if size_bytes < WHOLE_BELOW_BYTES:
        why = f"replicated over data: {size_bytes} B is under {WHOLE_BELOW_BYTES}"
        return LeafSharding(name, shape, compute, None, placed, ways, why)
    dims = _best_dims(shape, placed, ways, regroups=regroups)
    rests = _placed(shape, dims)
    sharded = LeafSharding(name, shape, compute, dims[0], rests, ways, "")
    return dataclasses.replace(sharded, why=_why(sharded, placed))


def _placed(
    shape: tuple[int, ...], dims: tuple[int | None, ...]
) -> tuple[tuple[str, ...], ...]:
    """By dim, which of pipe and tensor split it."""
    axes = list(zip(AXES, dims, strict=True))[1:]
    return tuple(
        tuple(axis for axis, own in axes if own == dim) for dim in range(len(shape))
    )


def _why(leaf: LeafSharding, ruled: tuple[tuple[str, ...], ...]) -> str:
    parts = []
    for axis in (TENSOR, PIPE):
        ways, dim = leaf.ways[AXES.index(axis)], leaf.dim_of(axis)
        if ways > 1 and dim is not None and axis in ruled[dim]:
            parts.append(f"rule: {axis} splits dim {dim}")
        elif dim is not None and axis not in ruled[dim]:
            parts.append(f"stored sharded over {axis} on dim {dim}")
        elif ways > 1:
            parts.append(f"replicated over {axis}: {ways} divides no dim")
    data = leaf.ways[0]
    if leaf.data_dim is not None:
        parts.append(f"zero: data splits dim {leaf.data_dim}")
    elif data > 1:
        parts.append(f"replicated over data: {data} divides no dim")
    return "; ".join(parts) or "one device on every axis"


def _best_dims(
    shape: tuple[int, ...],
    ruled: tuple[tuple[str, ...], ...],
    ways: tuple[int, int, int],
    *,
    regroups: bool,
) -> tuple[int | None, ...]:
    """Choose the dims that data, pipe and tensor split in storage: most shards first.

    Ties: not a leading dim that looks like a stack of layers (a scan slices along it),
    then a separate dim for each axis, then the largest dim, then the last.
    """
    stacked = len(shape) > 1 and shape[0] * 8 <= max(shape[1:])
    by_rule = [
        next((dim for dim, axes in enumerate(ruled) if axis in axes), None)
        for axis in AXES
    ]
    free = [
        None if rule is not None or size == 1 else range(regroups, len(shape))
        for rule, size in zip(by_rule, ways, strict=True)
    ]
    choices = [
        [rule] if dims is None else [None, *dims]
        for rule, dims in zip(by_rule, free, strict=True)
    ]

    def fits(dims: tuple[int | None, ...]) -> bool:
        data, pipe, tensor = dims
        if regroups and pipe is not None and pipe in (data, tensor):
            return False
        split = [1] * len(shape)
        for dim, size in zip(dims, ways, strict=True):
            if dim is not None:
                split[dim] *= size
        return all(size % by == 0 for size, by in zip(shape, split, strict=True))

    def merit(dims: tuple[int | None, ...]) -> tuple:
        used = [dim for dim in dims if dim is not None]
        shards = math.prod(
            size for dim, size in zip(dims, ways, strict=True) if dim is not None
        )
        slices = stacked and any(
            dim == 0 and rule is None for dim, rule in zip(dims, by_rule, strict=True)
        )
        sizes = [(shape[d], d) if d is not None else (0, -1) for d in dims]
        return (shards, not slices, len(set(used)) - len(used), *sizes)

    return max(filter(fits, itertools.product(*choices)), key=merit)
