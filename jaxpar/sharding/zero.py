"""Where is each leaf stored, and where is it computed on: ZeRO as two axis maps.

A stage is a row of a table, not a code path (`STAGES`), and a leaf's layout is a
`LeafPlan`: the spec it rests at and the spec it is computed at. At stages 1-3 a leaf
rests over data *and* tensor, whatever its compute spec, so the state of Adam takes
12 Psi / N bytes.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", sections 5 and 7. Differs: parameters rest sharded at stages 1 and 2
too (the fp32 masters are the parameters), and are gathered once a step.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import DATA, TENSOR
from jaxpar.sharding.rules import Spec

WHOLE_BELOW_BYTES = 1024
"""Leaves smaller than this are kept whole over data."""

LARGE_BYTES = 1 << 20
"""A leaf of at least this many bytes must be sharded, or be allowed not to be."""


@dataclasses.dataclass(frozen=True)
class ZeroStage:
    """One row of the ZeRO table.

    Attributes:
      number: 0, 1, 2 or 3.
      rest: parameters and optimizer state rest "whole" or "sharded" over data.
      gather: parameters are gathered once a "step", at every "use", or "never".
      reduce: gradients cross data once a "step" or every "microbatch".
    """

    number: int
    rest: Literal["whole", "sharded"]
    gather: Literal["never", "step", "use"]
    reduce: Literal["step", "microbatch"]


STAGES = (
    ZeroStage(0, rest="whole", gather="never", reduce="step"),
    ZeroStage(1, rest="sharded", gather="step", reduce="step"),
    ZeroStage(2, rest="sharded", gather="step", reduce="microbatch"),
    ZeroStage(3, rest="sharded", gather="use", reduce="microbatch"),
)


def zero_stage(number: int) -> ZeroStage:
    """Look a stage up.

    Raises:
      ValueError: if `number` is not 0, 1, 2 or 3.

    Example:
      >>> zero_stage(3).gather
      'use'
    """
    if type(number) is not int or number not in range(len(STAGES)):
        raise ValueError(
            f"zero={number!r} must be 0 (replicate), 1 (shard the state), 2 (and the "
            "gradients) or 3 (and gather parameters at use)."
        )
    return STAGES[number]


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one leaf is laid out.

    A dim that rests over tensor and data both is split in two in the leaf's *view*
    (tensor's part, data's part): in manual mode the data axis can then be gathered
    without moving what tensor holds.

    Attributes:
      name: the leaf's path.
      shape: its logical shape.
      compute: one mesh axis or None per dim, while it is computed on.
      data_dim: the dim that data splits at rest; None if data keeps it whole.
      tensor_dim: the dim that tensor splits at rest; None likewise.
      ways: (data, tensor) sizes of the mesh.
      why: the reason, for people.
    """

    name: str
    shape: tuple[int, ...]
    compute: Spec
    data_dim: int | None
    tensor_dim: int | None
    ways: tuple[int, int]
    why: str

    @property
    def shares_dim(self) -> bool:
        """Whether data and tensor split the same dim at rest."""
        return self.data_dim is not None and self.data_dim == self.tensor_dim

    @property
    def rest_spec(self) -> P:
        """The spec at rest, over the logical shape."""
        entries: list = [None] * len(self.shape)
        if self.tensor_dim is not None:
            entries[self.tensor_dim] = TENSOR
        if self.data_dim is not None:
            entries[self.data_dim] = (TENSOR, DATA) if self.shares_dim else DATA
        return P(*entries)

    @property
    def compute_spec(self) -> P:
        """The spec while computed on, over the logical shape."""
        return P(*self.compute)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The logical shape with a dim that both axes share split in two."""
        dim, ways = self.data_dim, self.ways[1]
        if dim is None or not self.shares_dim:
            return self.shape
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

    def view_spec(self, *, data: bool = True, tensor: bool = True) -> P:
        """The spec at rest over the view, of either axis or both."""
        entries: list = [None] * len(self.view_shape)
        if tensor and self.tensor_dim is not None:
            entries[self.tensor_dim] = TENSOR
        if data and self.view_data_dim is not None:
            entries[self.view_data_dim] = DATA
        return P(*entries)

    def without_leading_dim(self) -> "LeafPlan | None":
        """The plan of one slice along dim 0; None if an axis splits that dim."""
        if 0 in (self.data_dim, self.tensor_dim) or self.compute[0] is not None:
            return None
        return dataclasses.replace(
            self,
            shape=self.shape[1:],
            compute=self.compute[1:],
            data_dim=None if self.data_dim is None else self.data_dim - 1,
            tensor_dim=None if self.tensor_dim is None else self.tensor_dim - 1,
        )


def plan_leaves(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    compute: Mapping[str, Spec],
    stage: ZeroStage,
    sizes: Mapping[str, int],
    allow_whole: Sequence[str] = (),
) -> dict[str, LeafPlan]:
    """Lay every leaf out for a stage and a mesh.

    Args:
      leaves: leaf name -> shape and dtype.
      compute: leaf name -> its compute spec.
      stage: the row of the ZeRO table.
      sizes: mesh axis -> devices on it.
      allow_whole: path patterns of large leaves that may stay whole over data.

    Returns:
      leaf name -> plan.

    Raises:
      ValueError: if a large leaf cannot be sharded over data and is not allowed to
        stay whole, or `allow_whole` is one string, or a pattern of it matches nothing.
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
    ways = (sizes[DATA], sizes[TENSOR])
    plans = {}
    for name, leaf in leaves.items():
        plan = _plan_leaf(name, leaf, compute[name], stage, ways)
        allowed = any(tree.matches(pattern, name) for pattern in allow_whole)
        if _is_too_large_to_stay_whole(plan, leaf, stage) and not allowed:
            raise ValueError(
                f"zero={stage.number}: {name} (shape {leaf.shape}, "
                f"{tree.num_bytes(leaf) / 2**20:.1f} MiB) has no dim that data="
                f"{ways[0]} divides, so every device would hold it whole. Pad a dim to "
                f"a multiple of {ways[0]}, change the mesh, or pass "
                f"allow_whole=({name!r},)."
            )
        plans[name] = plan
    return plans


def _is_too_large_to_stay_whole(
    plan: LeafPlan, leaf: jax.ShapeDtypeStruct, stage: ZeroStage
) -> bool:
    return (
        stage.rest == "sharded"
        and plan.ways[0] > 1
        and plan.data_dim is None
        and tree.num_bytes(leaf) >= LARGE_BYTES
    )


def _plan_leaf(
    name: str,
    leaf: jax.ShapeDtypeStruct,
    compute: Spec,
    stage: ZeroStage,
    ways: tuple[int, int],
) -> LeafPlan:
    shape = tuple(leaf.shape)
    ruled = compute.index(TENSOR) if TENSOR in compute else None
    if stage.rest == "whole":
        why = "stage 0 replicates over data"
        return LeafPlan(name, shape, compute, None, ruled, ways, why)
    size_bytes = math.prod(shape) * np.dtype(leaf.dtype).itemsize
    if size_bytes < WHOLE_BELOW_BYTES:
        why = f"kept whole over data: {size_bytes} B is under {WHOLE_BELOW_BYTES}"
        return LeafPlan(name, shape, compute, None, ruled, ways, why)
    data_dim, tensor_dim = _best_dims(shape, ruled, ways)
    plan = LeafPlan(name, shape, compute, data_dim, tensor_dim, ways, "")
    return dataclasses.replace(plan, why=_why(plan, ruled))


def _why(plan: LeafPlan, ruled: int | None) -> str:
    data, tensor = plan.ways
    parts = []
    if tensor > 1 and ruled is not None:
        parts.append(f"rule: tensor splits dim {ruled}")
    elif plan.tensor_dim is not None:
        parts.append(f"rests over tensor on dim {plan.tensor_dim}")
    elif tensor > 1:
        parts.append(f"whole over tensor: no dim divides by {tensor}")
    if plan.data_dim is not None:
        parts.append(f"zero: data splits dim {plan.data_dim}")
    elif data > 1:
        parts.append(f"whole over data: no dim divides by {data}")
    return "; ".join(parts) or "one device on data and tensor"


def _best_dims(
    shape: tuple[int, ...], ruled: int | None, ways: tuple[int, int]
) -> tuple[int | None, int | None]:
    """Pick the dims that data and tensor split at rest: most shards first.

    Among equals: not a leading dim that looks like a stack of layers (a scan slices
    along it), then a dim of its own for each axis, then the largest, then the last.
    """
    data, tensor = ways
    stacked = len(shape) > 1 and shape[0] * 8 <= max(shape[1:])
    free = [None, *range(len(shape))]
    tensor_dims = [ruled] if ruled is not None else (free if tensor > 1 else [None])
    data_dims = free if data > 1 else [None]

    def fits(data_dim: int | None, tensor_dim: int | None) -> bool:
        return all(
            size
            % ((data if dim == data_dim else 1) * (tensor if dim == tensor_dim else 1))
            == 0
            for dim, size in enumerate(shape)
        )

    def merit(pair: tuple[int | None, int | None]) -> tuple:
        shards = (data if pair[0] is not None else 1) * (
            tensor if pair[1] is not None else 1
        )
        sizes = [(shape[d], d) if d is not None else (0, -1) for d in pair]
        slices = stacked and 0 in pair
        return (shards, not slices, pair[0] is None or pair[0] != pair[1], *sizes)

    return max(
        (p for p in itertools.product(data_dims, tensor_dims) if fits(*p)), key=merit
    )
