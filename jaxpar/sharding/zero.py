"""How is each leaf stored, and how computed on: ZeRO as two specs per leaf.

A ZeRO stage is a row of a table, not a code path (`ZERO_STAGES`); a leaf's two specs
are a `jaxpar.sharding.leaf_sharding.LeafSharding`. At ZeRO stages 1-3 a leaf is stored
sharded over data, pipe *and* tensor, whatever its compute spec, so the state of Adam
takes 12 Psi / N bytes; with replicas, N is the devices of one.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", sections 5 and 7. Differs: parameters are stored sharded at ZeRO
stages 1 and 2 too (the fp32 masters are the parameters), and are gathered once a step.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from jaxpar import tree
from jaxpar.mesh import BATCH_AXES, DATA, EXPERT, PIPE, REPLICA, TENSOR
from jaxpar.sharding.block_codes import BlockCodes
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import Spec, axes_of
from jaxpar.sharding.zero_plus_plus import ZeroPlusPlus

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
      keep: whether parameters that are gathered at use are kept for the backward pass.
      plus: what of ZeRO++ is used; None for nothing.
    """

    number: int
    stored: Literal["whole", "sharded"]
    gather: Literal["never", "step", "use"]
    reduce: Literal["step", "microbatch"]
    keep: bool = False
    plus: ZeroPlusPlus | None = None

    @property
    def over_replicas(self) -> bool:
        """Whether replicas split the state further; a step gathers over them once."""
        return self.plus is not None and self.plus.secondary

    @property
    def weights(self) -> BlockCodes | None:
        """How parameters are coded while they are gathered."""
        return None if self.plus is None else self.plus.weights

    @property
    def gradients(self) -> BlockCodes | None:
        """How gradients are coded while they are reduced inside a replica."""
        return None if self.plus is None else self.plus.gradients_inside

    @property
    def by_layer(self) -> "ZeroStage":
        """The row if a step is one micro-batch: what is gathered once can be at use.

        Loops over layers then gather and reduce layer by layer, as at ZeRO 3.
        """
        if self.gather != "step":
            return self
        return dataclasses.replace(self, gather="use", reduce="microbatch", keep=True)

    @property
    def once(self) -> "ZeroStage":
        """The row where a reduction of its own reduces once a step."""
        return dataclasses.replace(self, reduce="step")

    @property
    def at_use(self) -> "ZeroStage":
        """The row where parameters are off the devices: each is gathered when used."""
        return dataclasses.replace(self, gather="use", reduce="microbatch", keep=False)


ZERO_STAGES = (
    ZeroStage(0, stored="whole", gather="never", reduce="step"),
    ZeroStage(1, stored="sharded", gather="step", reduce="step"),
    ZeroStage(2, stored="sharded", gather="step", reduce="microbatch"),
    ZeroStage(3, stored="sharded", gather="use", reduce="microbatch"),
)


def zero_stage(number: int | ZeroPlusPlus) -> ZeroStage:
    """Look up a ZeRO stage.

    Raises:
      ValueError: if `number` is not 0, 1, 2, 3 or a `ZeroPlusPlus`.

    Example:
      >>> zero_stage(3).gather
      'use'
    """
    if isinstance(number, ZeroPlusPlus):
        return dataclasses.replace(ZERO_STAGES[number.stage], plus=number)
    if type(number) is not int or number not in range(len(ZERO_STAGES)):
        raise ValueError(
            f"zero={number!r} must be 0 (replicate), 1 (shard the state), 2 (and the "
            "gradients) or 3 (and gather parameters at use); or a ZeroPlusPlus."
        )
    return ZERO_STAGES[number]


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
    leaf_shardings = {}
    for name, leaf in leaves.items():
        sharded = _shard_leaf(
            name, leaf, compute[name], zero, sizes, regroups=name in regrouped
        )
        allowed = any(tree.matches(pattern, name) for pattern in allow_whole)
        if _is_too_large_to_stay_whole(sharded, leaf, zero) and not allowed:
            ways = sharded.data_ways
            raise ValueError(
                f"zero={zero.number}: {name} (shape {leaf.shape}, "
                f"{tree.num_bytes(leaf) / 2**20:.1f} MiB) has no dim that "
                f"{' x '.join(sharded.data_axes)}={ways} divides, so every device "
                f"would hold all of it. Pad a dim to a multiple of {ways}, change the "
                f"mesh, or pass allow_whole=({name!r},)."
            )
        leaf_shardings[name] = sharded
    return leaf_shardings


def _is_too_large_to_stay_whole(
    sharded: LeafSharding, leaf: jax.ShapeDtypeStruct, zero: ZeroStage
) -> bool:
    return (
        zero.stored == "sharded"
        and sharded.data_ways > 1
        and not sharded.is_split
        and tree.num_bytes(leaf) >= LARGE_BYTES
    )


def _shard_leaf(
    name: str,
    leaf: jax.ShapeDtypeStruct,
    compute: Spec,
    zero: ZeroStage,
    sizes: Mapping[str, int],
    *,
    regroups: bool,
) -> LeafSharding:
    shape, ruled = tuple(leaf.shape), tuple(map(axes_of, compute))
    computed = {axis for axes in ruled for axis in axes}
    reduced = tuple(
        axis for axis in BATCH_AXES if sizes.get(axis, 1) > 1 and axis not in computed
    )
    whole = LeafSharding(name, shape, compute, None, ruled, sizes, "", reduced)
    if zero.stored == "whole":
        if regroups:
            placed = _placed(_best_dims(whole, (PIPE,), regroups=True), whole)
            whole = dataclasses.replace(whole, placed=placed)
        return dataclasses.replace(whole, why="ZeRO stage 0 replicates over data")
    size_bytes = math.prod(shape) * np.dtype(leaf.dtype).itemsize
    if size_bytes < WHOLE_BELOW_BYTES:
        why = f"replicated over data: {size_bytes} B is under {WHOLE_BELOW_BYTES}"
        return dataclasses.replace(whole, why=why)
    if zero.over_replicas and REPLICA in reduced:
        whole = dataclasses.replace(whole, over_replicas=True)
    dims = _best_dims(whole, (DATA, PIPE, TENSOR), regroups=regroups)
    placed = _placed(dims, whole)
    sharded = dataclasses.replace(whole, data_dim=dims[DATA], placed=placed)
    return dataclasses.replace(sharded, why=_why(sharded, ruled))


def _placed(
    dims: Mapping[str, int | None], leaf: LeafSharding
) -> tuple[tuple[str, ...], ...]:
    """By dim, which of the axes other than data split it."""
    return tuple(
        tuple(axis for axis, own in dims.items() if axis != DATA and own == dim)
        for dim in range(len(leaf.shape))
    )


def _why(leaf: LeafSharding, ruled: tuple[tuple[str, ...], ...]) -> str:
    parts = []
    for axis in (EXPERT, TENSOR, PIPE):
        ways, dim = leaf.sizes.get(axis, 1), leaf.dim_of(axis)
        if ways > 1 and dim is not None and axis in ruled[dim]:
            parts.append(f"rule: {axis} splits dim {dim}")
        elif dim is not None and axis not in ruled[dim]:
            parts.append(f"stored sharded over {axis} on dim {dim}")
        elif ways > 1 and axis != EXPERT:
            parts.append(f"replicated over {axis}: {ways} divides no dim")
    over = " x ".join(leaf.storage_axes)
    data = math.prod(leaf.sizes[axis] for axis in leaf.storage_axes)
    if leaf.is_split:
        parts.append(f"zero: {over} splits dim {leaf.data_dim}")
    elif data > 1:
        parts.append(f"replicated over {over}: {data} divides no dim")
    return "; ".join(parts) or "one device on every axis"


def _best_dims(
    leaf: LeafSharding, free: Collection[str], *, regroups: bool
) -> dict[str, int | None]:
    """Choose the dim that each axis splits in storage: most shards first.

    Axes that a rule places stay there; those of `free` are placed here, DATA for all of
    the leaf's data axes. Ties: not a leading dim that looks like a stack of layers (a
    scan slices along it), then a separate dim for each axis, then the largest dim, then
    the last.
    """
    shape = leaf.shape
    stacked = len(shape) > 1 and shape[0] * 8 <= max(shape[1:])
    ways = {DATA: math.prod(leaf.sizes[axis] for axis in leaf.storage_axes)}
    ways |= {axis: leaf.sizes.get(axis, 1) for axis in (EXPERT, PIPE, TENSOR)}
    by_rule = {axis: leaf.dim_of(axis) for axis in ways}
    choices = [
        [None, *range(regroups, len(shape))]
        if by_rule[axis] is None and ways[axis] > 1 and axis in free
        else [by_rule[axis]]
        for axis in ways
    ]

    def fits(dims: tuple[int | None, ...]) -> bool:
        data, expert, pipe, tensor = dims
        if regroups and pipe is not None and pipe in (data, tensor):
            return False
        if expert is not None and expert == data:  # Both are manual.
            return False
        split = [1] * len(shape)
        for dim, size in zip(dims, ways.values(), strict=True):
            if dim is not None:
                split[dim] *= size
        return all(size % by == 0 for size, by in zip(shape, split, strict=True))

    def merit(dims: tuple[int | None, ...]) -> tuple:
        used = {axis: dim for axis, dim in zip(ways, dims, strict=True)}
        placed = [dim for dim in dims if dim is not None]
        shards = math.prod(ways[a] for a, dim in used.items() if dim is not None)
        slices = stacked and any(
            dim == 0 and by_rule[axis] is None for axis, dim in used.items()
        )
        # Data, pipe and tensor, in this order.
        sizes = [
            (shape[dim], dim) if dim is not None else (0, -1)
            for axis, dim in used.items()
            if axis != EXPERT
        ]
        return (shards, not slices, len(set(placed)) - len(placed), *sizes)

    best = max(filter(fits, itertools.product(*choices)), key=merit)
    return dict(zip(ways, best, strict=True))
