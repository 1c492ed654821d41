"""What does a run cost, in a few lines or per leaf and collective: explain().

Shardings and their reasons come from the leaf shardings; communication and memory from
the compiled step.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from jaxpar import tree
from jaxpar.compiled.exposed_table import exposed_table, summary_of
from jaxpar.compiled.plain_text import as_plain_text
from jaxpar.compiled.program import CompiledProgram
from jaxpar.compiled.update_traffic import sent_text, update_text
from jaxpar.compiled.xla_flags import Setting
from jaxpar.mesh import axes_text, num_batch_shards
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.memory_kinds import is_on_host
from jaxpar.sharding.zero import ZeroStage
from jaxpar.types import PyTree

_MEANT = {
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
        "pass computes them.",
    ),
    3: (
        "data: parameters are cast, then all-gathered where they are used: twice a "
        "micro-batch, for the forward and the backward pass.",
        "data: gradients are reduce-scattered every micro-batch, where the backward "
        "pass computes them.",
    ),
}

_PARTS = ("params", "frozen", "model_state", "opt_state", "carried")
"""Parts of the train state that are named; the others are a few scalars."""

COPIES = "params/copies/"
"""Begins the names of copies in the compute dtype, where a packed state has some."""

_FOR_DETAILS = "explain().details has a row for each leaf and each collective"


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One row of the table.

    Attributes:
      name: the leaf's path in the train state.
      shape: its logical shape.
      dtype: its dtype.
      spec: its stored sharding.
      bytes: bytes of the whole leaf.
      bytes_per_device: bytes of its shard in one device's memory.
      why: the reason for its sharding; empty for leaves that follow another.
      host_bytes_per_device: bytes of its shard in the host's memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes: int
    bytes_per_device: int
    why: str
    host_bytes_per_device: int = 0


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The cost of a step, for people (``print``) and programs (``as_json``).

    ``print(explanation)`` says what a device stores and sends, and what is to be noted;
    ``print(explanation.details)`` has a row for each leaf and each collective.

    Attributes:
      mesh: axis -> devices.
      zero: the ZeRO stage.
      leaves: a row per leaf of the train state.
      closed_form: what should be communicated over which axis, by the ZeRO stage.
      notes: lines about the pipeline, the optimizer and the loss: what is done in
        another way than asked for, and what was not checked.
      program: what is communicated, and the memory, read from the compiled step.
      settings: the compiler options that were set, and why.
    """

    mesh: dict[str, int]
    zero: int
    leaves: tuple[LeafReport, ...]
    closed_form: tuple[str, ...]
    notes: tuple[str, ...]
    program: CompiledProgram
    settings: tuple[Setting, ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the stored state in one device's memory, without padding."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def host_bytes_per_device(self) -> int:
        """Bytes of the stored state in the host's memory, for each of its devices."""
        return sum(leaf.host_bytes_per_device for leaf in self.leaves)

    @property
    def summary(self) -> str:
        """Two lines: what a device stores of the state, and what it sends in a step."""
        on_host = self.host_bytes_per_device
        axes = {axis: size for axis, size in self.mesh.items() if size > 1}
        whole = sum(leaf.bytes for leaf in self.leaves)
        collectives = self.program.collectives
        sent = decimal(sum(row.sent_bytes for row in collectives))
        parts = sent_text(collectives)
        return (
            f"a device stores {decimal(self.bytes_per_device)}"
            + (f", and in host memory {decimal(on_host)}," if on_host else "")
            + f" of the {decimal(whole)} train state (ZeRO {self.zero} on "
            f"{axes_text(axes) or 'one device'})\n"
            f"a device sends {sent} a step" + (f": {parts}" if parts else "")
        )

    def as_json(self) -> str:
        """The explanation as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        exposed = self.program.communication
        lines = [self.summary, self._by_part(), self._memory()]
        lines += [summary_of(exposed)] if exposed else []
        of_update = self.program.of_update
        lines += [update_text(of_update, self.zero)] if sent_text(of_update) else []
        lines += [f"- {line}" for line in (*self.notes, *self._unknown_loops)]
        return "\n".join([*lines, _FOR_DETAILS])

    def _by_part(self) -> str:
        """The stored bytes by part of the state, and the number of parameters."""
        stored: dict[str, int] = dict.fromkeys((*_PARTS, "other"), 0)
        parameters = 0
        for leaf in self.leaves:
            part, _, path = leaf.name.partition("/")
            part = part if part in _PARTS else "other"
            held = leaf.bytes_per_device + leaf.host_bytes_per_device
            if part == "carried":
                part = f"carried/{path.partition('/')[0]}"
            stored[part] = stored.get(part, 0) + held
            is_copy = leaf.name.startswith(COPIES)
            is_weight = part in ("params", "frozen") and not is_copy
            parameters += math.prod(leaf.shape) if is_weight else 0
        parts = ", ".join(f"{decimal(n)} {part}" for part, n in stored.items() if n)
        return f"stored: {parts}; the model has {parameters:,} parameters"

    def _memory(self) -> str:
        memory = self.program.memory
        return (
            f"a step takes {decimal(memory.peak)} of a device's memory at its peak; "
            f"{decimal(memory.temporaries)} are temporary"
        )

    @property
    def _unknown_loops(self) -> list[str]:
        loops = self.program.unknown_loops
        return [f"loop {loop}: trip count unknown, counted once" for loop in loops]

    @property
    def details(self) -> str:
        """A row for each leaf and each collective, the memory, and the options."""
        return as_plain_text(self._print_details, width=140)

    def _print_details(self, console: Console) -> None:
        console.print(f"mesh {axes_text(self.mesh)}, ZeRO {self.zero}")
        console.print(_leaf_table(self.leaves))
        stored = f"stored state: {self.bytes_per_device:,} bytes per device"
        if self.host_bytes_per_device:
            stored += f", and {self.host_bytes_per_device:,} in host memory"
        console.print(stored)
        console.print("\ncommunication per step, read from the compiled program:")
        console.print(_traffic_table(self.program))
        exposed = self.program.communication
        console.print(f"- {summary_of(exposed)}")
        if exposed and exposed.collectives:
            console.print(exposed_table(exposed))
        for line in self.closed_form:
            console.print(f"- closed form: {line}")
        if self.program.collectives:
            of_update = update_text(self.program.of_update, self.zero)
            console.print(f"- {of_update}")
        for line in (*self.notes, *self._unknown_loops):
            console.print(f"- {line}")
        console.print("\nmemory of the compiled step, bytes per device:")
        for name, number in dataclasses.asdict(self.program.memory).items():
            console.print(f"  {name.replace('_', ' '):<12}{number:>18,}")
        for name, part in self.program.parts.items():
            sent = sum(row.sent_bytes for row in part.collectives)
            peak = part.memory.peak
            console.print(f"- {name}: peak {peak:,} bytes, sends {sent:,} bytes")
        if self.settings:
            console.print("\ncompiler options:")
        for setting in self.settings:
            console.print(f"- {setting.option}={setting.value}: {setting.why}")

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """The text that a notebook shows."""
        return {"text/plain": str(self)}


def _leaf_table(leaves: Sequence[LeafReport]) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("leaf", "shape", "dtype", "spec"):
        table.add_column(column, overflow="fold")
    kept = {"bytes/device": [leaf.bytes_per_device for leaf in leaves]}
    on_host = [leaf.host_bytes_per_device for leaf in leaves]
    kept |= {"on host": on_host} if any(on_host) else {}
    for column in kept:
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for leaf, *numbers in zip(leaves, *kept.values(), strict=True):
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        cells = (f"{number:,}" for number in numbers)
        table.add_row(leaf.name, shape, leaf.dtype, leaf.spec, *cells, leaf.why)
    return table


def _traffic_table(program: CompiledProgram) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("axis", "collective", "dtype"):
        table.add_column(column)
    for column in ("times", "bytes", "sent/device", "largest"):
        table.add_column(column, justify="right")
    for row in program.collectives:
        numbers = (row.count, row.bytes, row.sent_bytes, row.largest)
        table.add_row(
            " x ".join(row.axes) or "none",
            row.kind,
            row.dtype,
            *(f"{number:,}" for number in numbers),
        )
    if not program.collectives:
        table.add_row("none", "no communication", *("",) * 5)
    return table


def make_explanation(
    state: PyTree,
    leaf_shardings: Mapping[str, LeafSharding],
    zero: ZeroStage,
    *,
    coupled: bool,
    program: CompiledProgram,
    settings: tuple[Setting, ...] = (),
    notes: tuple[str, ...] = (),
    remarks: tuple[str, ...] = (),
) -> Explanation:
    """Explain a step.

    Args:
      state: the train state's shapes, dtypes and shardings.
      leaf_shardings: parameter name -> sharding.
      zero: the row of the ZeRO table.
      coupled: whether examples are coupled (data is automatic).
      program: the compiled step, read.
      settings: the compiler options.
      notes: of a pipeline; with one, every stage reduces and gathers once.
      remarks: the optimizer's and the loss's.

    Returns:
      The explanation.
    """
    leaves = tree.named_leaves(state)
    rows = [
        _row(
            name,
            leaf,
            _sharding_of(name, leaf_shardings),
            on_host=is_on_host(leaf.sharding) or f"state[{number}]" in program.on_host,
        )
        for number, (name, leaf) in enumerate(leaves.items())
    ]
    mesh = next(iter(leaves.values())).sharding.mesh
    closed_form = _meant(
        min(zero.number, 1) if notes else zero.number,
        num_batch_shards(mesh),
        list(leaf_shardings.values()),
        coupled,
    )
    return Explanation(
        mesh=dict(mesh.shape),
        zero=zero.number,
        leaves=tuple(rows),
        closed_form=closed_form,
        notes=(*notes, *remarks),
        program=program,
        settings=settings,
    )


def state_bytes(state: PyTree) -> dict[str, tuple[int, int]]:
    """The leaves of a state -> bytes on one device, and of it on its host.

    Args:
      state: shapes, dtypes and shardings.

    Returns:
      Bytes without padding; one of each pair is 0.
    """
    leaves = tree.named_leaves(state)
    return {name: _stored_bytes(leaf) for name, leaf in leaves.items()}


def total(stored: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Sum the bytes of `state_bytes` on one device, and on its host."""
    return sum(on for on, _ in stored.values()), sum(off for _, off in stored.values())


def _stored_bytes(leaf: jax.ShapeDtypeStruct) -> tuple[int, int]:
    number = _piece_bytes(leaf)
    return (0, number) if is_on_host(leaf.sharding) else (number, 0)


def _piece_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _logical_bytes(leaf)
    assert leaf.sharding is not None, "stored state has shardings"
    piece = leaf.sharding.shard_shape(leaf.shape)
    return tree.num_bytes(jax.ShapeDtypeStruct(piece, leaf.dtype))


def _logical_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tree.num_bytes(leaf)


def _sharding_of(
    name: str, leaf_shardings: Mapping[str, LeafSharding]
) -> LeafSharding | None:
    """A parameter's sharding; with several losses its name follows its loss's."""
    part, *path = name.split("/")
    ends = ("/".join(path[i:]) for i in range(len(path)))
    found = next((leaf_shardings[end] for end in ends if end in leaf_shardings), None)
    return found if part in ("params", "frozen") else None


def _row(
    name: str,
    leaf: jax.ShapeDtypeStruct,
    sharded: LeafSharding | None,
    *,
    on_host: bool,
) -> LeafReport:
    assert isinstance(leaf.sharding, NamedSharding), "stored state has named shardings"
    number = _piece_bytes(leaf)
    return LeafReport(
        name=name,
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype),
        spec=str(tuple(leaf.sharding.spec)),
        bytes=_logical_bytes(leaf),
        bytes_per_device=0 if on_host else number,
        why=sharded.why if sharded else "",
        host_bytes_per_device=number if on_host else 0,
    )


def _meant(
    number: int, data: int, leaf_shardings: Sequence[LeafSharding], coupled: bool
) -> tuple[str, ...]:
    if data == 1:
        lines: tuple[str, ...] = ("data: one device, no communication.",)
    elif coupled:
        lines = (
            "data: examples are coupled, so the compiler inserts the collectives and "
            "gradients are reduced every micro-batch.",
        )
    else:
        lines = _MEANT[number]
    ruled = sum(any(leaf.compute) for leaf in leaf_shardings)
    return (*lines, f"tensor: {ruled} parameters are split by rule.")
