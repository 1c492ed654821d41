"""What does a run's layout cost, leaf by leaf, and what crosses which axis: explain().

The table is read from the layout itself: specs, bytes per device at rest, and why.
"""

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from rich import box
from rich.console import Console
from rich.table import Table

from jaxpar import tree
from jaxpar.mesh import DATA
from jaxpar.sharding.zero import LeafPlan, ZeroStage
from jaxpar.types import PyTree

_CROSSES = {
    0: (
        "data: gradients are summed over micro-batches, then all-reduced once a step.",
    ),
    1: (
        "data: parameters are cast, then all-gathered once a step.",
        "data: gradients are summed over micro-batches, then reduce-scattered once a "
        "step.",
    ),
    2: (
        "data: parameters are cast, then all-gathered once a step.",
        "data: gradients are reduce-scattered every micro-batch, where the backward "
        "pass makes them.",
    ),
    3: (
        "data: parameters are cast, then all-gathered where they are used: twice a "
        "micro-batch, for the forward and the backward pass.",
        "data: gradients are reduce-scattered every micro-batch, where the backward "
        "pass makes them.",
    ),
}


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One row of the table.

    Attributes:
      name: the leaf's path in the train state.
      shape: its logical shape.
      dtype: its dtype.
      spec: where it rests.
      bytes_per_device: bytes of its piece on one device.
      why: the reason for its layout; empty for leaves that follow another.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes_per_device: int
    why: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A run's layout, for people (``print``) and programs (``as_json``).

    Attributes:
      mesh: axis -> devices.
      zero: the ZeRO stage.
      leaves: a row per leaf of the train state.
      crosses: what crosses which axis in a step.
    """

    mesh: dict[str, int]
    zero: int
    leaves: tuple[LeafReport, ...]
    crosses: tuple[str, ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the whole state at rest on one device."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def as_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE, title=None)
        for column in ("leaf", "shape", "dtype", "spec"):
            table.add_column(column, overflow="fold")
        table.add_column("bytes/device", justify="right")
        table.add_column("why", overflow="fold")
        for leaf in self.leaves:
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            number = f"{leaf.bytes_per_device:,}"
            table.add_row(leaf.name, shape, leaf.dtype, leaf.spec, number, leaf.why)
        out = io.StringIO()
        console = Console(file=out, width=140, color_system=None)
        shape = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        console.print(f"mesh {shape}, ZeRO {self.zero}")
        console.print(table)
        console.print(f"state at rest: {self.bytes_per_device:,} bytes per device")
        for line in self.crosses:
            console.print(f"- {line}")
        return out.getvalue()


def make_explanation(
    abstract: PyTree,
    shardings: PyTree,
    plans: Mapping[str, LeafPlan],
    stage: ZeroStage,
    *,
    coupled: bool,
) -> Explanation:
    """Explain a layout.

    Args:
      abstract: the train state's shapes.
      shardings: its shardings.
      plans: parameter name -> plan.
      stage: the row of the ZeRO table.
      coupled: whether examples are coupled (data is automatic).

    Returns:
      The explanation.
    """
    placed = tree.named_leaves(shardings)
    rows = []
    for name, leaf in tree.named_leaves(abstract).items():
        plan = plans.get(name.removeprefix("params/"))
        rows.append(_row(name, leaf, placed[name], plan))
    mesh = next(iter(placed.values())).mesh
    return Explanation(
        mesh=dict(mesh.shape),
        zero=stage.number,
        leaves=tuple(rows),
        crosses=_crosses(stage, mesh.shape[DATA], list(plans.values()), coupled),
    )


def _row(
    name: str,
    leaf: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
    plan: LeafPlan | None,
) -> LeafReport:
    struct = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return LeafReport(
        name=name,
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype),
        spec=str(tuple(sharding.spec)),
        bytes_per_device=8 if is_key else tree.num_bytes(struct),
        why=plan.why if plan else "",
    )


def _crosses(
    stage: ZeroStage, data: int, plans: Sequence[LeafPlan], coupled: bool
) -> tuple[str, ...]:
    if data == 1:
        lines: tuple[str, ...] = ("data: one device, nothing crosses.",)
    elif coupled:
        lines = (
            "data: examples are coupled, so the compiler places the collectives and "
            "gradients are reduced every micro-batch.",
        )
    else:
        lines = _CROSSES[stage.number]
    ruled = sum(any(plan.compute) for plan in plans)
    return (*lines, f"tensor: {ruled} parameters are split by rule.")
