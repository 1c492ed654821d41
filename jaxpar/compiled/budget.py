"""Does a compiled step stay within its budget of memory and communication?

A budget is a small JSON object that users store in a file next to their tests. Each
violation names its cause: the leaf that is stored too large, or the operation whose
collective moves too many bytes.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpar.compiled.explain import Explanation, LeafReport
from jaxpar.compiled.hlo import Module
from jaxpar.compiled.source_lines import Operation, read_operations

REDUCTION = "reduction"
"""A kind of collective in a budget: all-reduces and reduce-scatters together."""

_REDUCTIONS = frozenset({"all-reduce", "reduce-scatter", REDUCTION})
_SHOWN = 5
_SMALL_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory and the communication that a compiled step may use, on one device.

    Attributes:
      state_bytes: bytes of the train state in the device's memory, without padding.
      communicated: axes, such as "data" or "data x tensor" -> kind of collective, such
        as "all-gather" -> bytes of the unsharded arrays in a step. The kind "reduction"
        is the sum of all-reduces and reduce-scatters. On CPUs they are always counted
        together, because XLA:CPU makes all-reduces where GPUs make reduce-scatters.
      peak_bytes: peak memory; None for no limit.
      tolerance: fraction by which each number may be exceeded.
      small_bytes: bytes allowed beyond each number, for losses and norms.
      unbounded: axes without a limit on communication.
      host_state_bytes: bytes of the train state in the host's memory.
    """

    state_bytes: int
    communicated: Mapping[str, Mapping[str, int]]
    peak_bytes: int | None = None
    tolerance: float = 0.05
    small_bytes: int = _SMALL_BYTES
    unbounded: tuple[str, ...] = ()
    host_state_bytes: int = 0

    def as_json(self) -> str:
        """The budget as a JSON object, to be stored in a file."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Budget":
        """Read what `as_json` wrote.

        Args:
          text: the JSON object; fields with a default may be missing.

        Returns:
          The budget.

        Raises:
          ValueError: if the text is not a budget.

        Example:
          >>> budget = Budget(64, {"data": {"all-gather": 128}})
          >>> Budget.from_json(budget.as_json()) == budget
          True
        """
        found: dict[str, Any] = json.loads(text)
        if "crossing" in found:  # Its name before 2026-11.
            found["communicated"] = found.pop("crossing")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(found.keys() - set(known))
        missing = sorted({"state_bytes", "communicated"} - found.keys())
        if unknown or missing:
            raise ValueError(
                f"budget: the JSON object has no {missing} and unknown {unknown}; its "
                f"keys are {', '.join(known)}. Write the file with Budget.as_json()."
            )
        return cls(**{**found, "unbounded": tuple(found.get("unbounded", ()))})


class BudgetExceeded(AssertionError):  # noqa: N818 - states the failure, as pytest does
    """A compiled step holds or communicates more than its budget.

    Args:
      violations: what is exceeded, by how much, and by which leaves or operations.
    """

    def __init__(self, violations: Sequence[str]):
        self.violations = tuple(violations)
        super().__init__(
            "verify: the compiled step exceeds its budget.\n\n"
            + "\n\n".join(self.violations)
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a compiled step holds and communicates, and the causes.

    Attributes:
      mesh: axis -> devices.
      leaves: the train state's leaves, with their bytes in the program.
      operations: the collectives, most bytes first.
      peak_bytes: peak memory.
      on_cpu: whether XLA:CPU compiled the program.
    """

    mesh: Mapping[str, int]
    leaves: tuple[LeafReport, ...]
    operations: tuple[Operation, ...]
    peak_bytes: int
    on_cpu: bool

    @property
    def state_bytes(self) -> int:
        """Bytes of the train state in the device's memory, without padding."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def host_state_bytes(self) -> int:
        """Bytes of the train state in the host's memory, without padding."""
        return sum(leaf.host_bytes_per_device for leaf in self.leaves)

    @property
    def small_bytes(self) -> int:
        """Bytes that are ignored: 0.1 % of the parameters' bytes, or 64 KiB."""
        params = [leaf for leaf in self.leaves if leaf.name.startswith("params/")]
        return max(_SMALL_BYTES, sum(map(_whole_bytes, params)) // 1000)

    @property
    def communicated(self) -> dict[str, dict[str, int]]:
        """Axes -> kind -> bytes, as in `Budget`; most bytes first."""
        found: dict[str, dict[str, int]] = {}
        for operation in self.operations:
            if operation.axes:
                kinds = found.setdefault(" x ".join(operation.axes), {})
                total = kinds.get(operation.kind, 0) + operation.bytes
                kinds[operation.kind] = total
        return found

    def budget(self) -> Budget:
        """The measured numbers as a budget, without what is below `small_bytes`."""
        large = {
            axes: {kind: n for kind, n in kinds.items() if n > self.small_bytes}
            for axes, kinds in self.communicated.items()
        }
        return Budget(
            state_bytes=self.state_bytes,
            communicated={axes: kinds for axes, kinds in large.items() if kinds},
            peak_bytes=self.peak_bytes,
            small_bytes=self.small_bytes,
            host_state_bytes=self.host_state_bytes,
        )


def measure(
    explanation: Explanation, module: Module, text: str, *, on_cpu: bool
) -> Measured:
    """Measure a compiled step.

    Args:
      explanation: of the step.
      module: its program, parsed; the state's leaves are ``state[0]``, ``state[1]`` and
        so on.
      text: the HLO text of `module`.
      on_cpu: whether XLA:CPU compiled it.

    Returns:
      What it holds and communicates.
    """
    held: dict[bool, dict[str, int]] = {
        on_host: collections.defaultdict(int) for on_host in (False, True)
    }
    for instruction, on_host in module.parameters:
        held[on_host][instruction.op_name] += sum(a.bytes for a in instruction.types)
    names = {f"state[{i}]": leaf.name for i, leaf in enumerate(explanation.leaves)}
    return Measured(
        mesh=explanation.mesh,
        leaves=tuple(
            dataclasses.replace(
                leaf,
                bytes_per_device=held[False][argument],
                host_bytes_per_device=held[True][argument],
            )
            for argument, leaf in zip(names, explanation.leaves, strict=True)
        ),
        operations=tuple(
            # A collective of a stored leaf has the name of its argument.
            dataclasses.replace(found, name=names.get(found.name, found.name))
            for found in read_operations(module, text, explanation.mesh)
        ),
        peak_bytes=explanation.program.memory.peak,
        on_cpu=on_cpu,
    )


def join_measured(parts: Iterable[Measured]) -> Measured:
    """Join what the programs of one step hold and communicate.

    Args:
      parts: at least one; a leaf is held by those that take it.
    """
    first, *others = parts
    if not others:
        return first
    every = [first, *others]
    leaves = [
        max(same, key=lambda leaf: leaf.bytes_per_device + leaf.host_bytes_per_device)
        for same in zip(*(part.leaves for part in every), strict=True)
    ]
    operations = [operation for part in every for operation in part.operations]
    return dataclasses.replace(
        first,
        leaves=tuple(leaves),
        operations=tuple(sorted(operations, key=lambda each: -each.bytes)),
    )


def check(budget: Budget, measured: Measured) -> list[str]:
    """Check a step against a budget.

    Args:
      budget: the limits.
      measured: the step.

    Returns:
      The violations, each with its leaves or operations, for people; empty if there
      are none.
    """
    return [
        *_check_state(budget, measured),
        *_check_host_state(budget, measured),
        *_check_communicated(budget, measured),
        *_check_peak(budget, measured),
    ]


def _check_state(budget: Budget, measured: Measured) -> list[str]:
    held, allowed = measured.state_bytes, budget.state_bytes
    if held <= allowed * (1 + budget.tolerance):
        return []
    num_devices = math.prod(measured.mesh.values())
    shares = {leaf: -(-_whole_bytes(leaf) // num_devices) for leaf in measured.leaves}
    over = {leaf: leaf.bytes_per_device - share for leaf, share in shares.items()}
    worst = sorted(measured.leaves, key=lambda leaf: -over[leaf])[:_SHOWN]
    lines = [
        f"{leaf.name} ({leaf.dtype}{list(leaf.shape)}) is stored as {leaf.spec}: "
        f"{leaf.bytes_per_device:,} bytes, {shares[leaf]:,} if sharded over all "
        f"{num_devices} devices{_why(leaf, measured.leaves)}"
        for leaf in worst
        if over[leaf] * 100 >= held - allowed
    ]
    return [
        _violation(
            f"state: {held:,} bytes per device, but the budget is {allowed:,}.",
            lines
            or ["every leaf is sharded over all devices: the state itself is larger"],
            "Raise zero=, or give a large leaf a dim that the axis sizes divide; if it "
            "is intended, record a new budget (engine.budget()).",
        )
    ]


def _check_host_state(budget: Budget, measured: Measured) -> list[str]:
    held, allowed = measured.host_state_bytes, budget.host_state_bytes
    if held <= allowed * (1 + budget.tolerance):
        return []
    largest = sorted(measured.leaves, key=lambda leaf: -leaf.host_bytes_per_device)
    lines = [
        f"{leaf.name} ({leaf.dtype}{list(leaf.shape)}): "
        f"{leaf.host_bytes_per_device:,} bytes"
        for leaf in largest[:_SHOWN]
        if leaf.host_bytes_per_device
    ]
    return [
        _violation(
            f"host state: {held:,} bytes in host memory for each device, but the "
            f"budget is {allowed:,}.",
            lines,
            "Host memory is shared by the host's devices and its programs; if it is "
            "intended, record a new budget (engine.budget()).",
        )
    ]


def _check_communicated(budget: Budget, measured: Measured) -> list[str]:
    found = []
    for axes, moved in measured.communicated.items():
        if set(axes.split(" x ")) <= set(budget.unbounded):
            continue
        named = dict(budget.communicated.get(axes, {}))
        if measured.on_cpu or REDUCTION in named:
            named, moved = _merged(named), _merged(moved)
        for kind, number in moved.items():
            allowed = named.get(kind, 0)
            spare = max(budget.tolerance * allowed, budget.small_bytes)
            if number - allowed > spare:
                causes = _causes(measured.operations, axes, kind)
                found.append(_over_axis(axes, kind, number, allowed, causes))
    return found


def _check_peak(budget: Budget, measured: Measured) -> list[str]:
    peak, allowed = measured.peak_bytes, budget.peak_bytes
    if allowed is None or peak <= allowed * (1 + budget.tolerance):
        return []
    return [
        _violation(
            f"peak: {peak:,} bytes per device, but the budget is {allowed:,}.",
            (),
            "Use remat= or more micro-batches (accumulate=); engine.explain() shows "
            "where the memory goes; if the peak is intended, record a new budget "
            "(engine.budget()).",
        )
    ]


def _over_axis(
    axes: str, kind: str, number: int, allowed: int, causes: Sequence[str]
) -> str:
    if allowed:
        than = f"but the budget is {allowed:,} ({number / allowed:.1f} times as much)."
    else:
        than = "which the budget does not name."
    collective = "all-reduce and reduce-scatter" if kind == REDUCTION else kind
    return _violation(
        f"{axes}: {collective} moves {number:,} bytes a step, {than}",
        causes,
        "If it is an activation, constrain its sharding where it is computed: "
        'jaxpar.constrain(x, "data"). If it is intended, record a new budget '
        "(engine.budget()).",
    )


def _causes(operations: Iterable[Operation], axes: str, kind: str) -> list[str]:
    """The operations of a kind over some axes, equal ones merged, largest first."""
    kinds = _REDUCTIONS if kind == REDUCTION else {kind}
    alike: dict[Operation, list[int]] = collections.defaultdict(lambda: [0, 0])
    for operation in operations:
        if operation.kind in kinds and " x ".join(operation.axes) == axes:
            entry = alike[dataclasses.replace(operation, times=0, bytes=0)]
            entry[0] += operation.times
            entry[1] += operation.bytes
    rows = [
        dataclasses.replace(operation, times=times, bytes=number)
        for operation, (times, number) in alike.items()
    ]
    rows.sort(key=lambda row: -row.bytes)
    left = len(rows) - _SHOWN
    more = [f"and {left} smaller ones"] if left > 0 else []
    return [*map(str, rows[:_SHOWN]), *more]


def _merged(kinds: Mapping[str, int]) -> dict[str, int]:
    """All-reduces and reduce-scatters as one kind."""
    others = {kind: n for kind, n in kinds.items() if kind not in _REDUCTIONS}
    return others | {
        REDUCTION: sum(n for kind, n in kinds.items() if kind in _REDUCTIONS)
    }


def _violation(said: str, causes: Sequence[str], remedy: str) -> str:
    return "\n".join([said, *(f"  - {cause}" for cause in causes), f"  {remedy}"])


def _why(leaf: LeafReport, leaves: Iterable[LeafReport]) -> str:
    """The reason for a leaf's sharding: its own, or of the parameter it mirrors."""
    for row in leaves:
        mirrored = f"/{leaf.name}".endswith(f"/{row.name.removeprefix('params/')}")
        if row.why and mirrored and row.shape == leaf.shape:
            return f" ({row.why})"
    return ""


def _whole_bytes(leaf: LeafReport) -> int:
    """Bytes of an unsharded leaf; jax's keys have no itemsize, and are small."""
    if leaf.dtype.startswith("key<"):
        return leaf.bytes_per_device
    return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
