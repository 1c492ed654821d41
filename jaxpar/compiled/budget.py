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

from jaxpar.compiled.explain import LeafReport
from jaxpar.compiled.measured import SMALL_BYTES, Measured, whole_bytes
from jaxpar.compiled.source_lines import Operation
from jaxpar.launch.typed_json import as_kind
from jaxpar.mesh import BATCH_AXES

REDUCTION = "reduction"
"""A kind of collective in a budget: all-reduces and reduce-scatters together."""

_REDUCTIONS = frozenset({"all-reduce", "reduce-scatter", REDUCTION})
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory and communication that a compiled step may and must use, on a device.

    Attributes:
      state_bytes: bytes of the train state in the device's memory, without padding.
      communicated: axes, such as "data" or "data x tensor" -> kind of collective, such
        as "all-gather" -> bytes of the unsharded arrays in a step. The kind "reduction"
        is the sum of all-reduces and reduce-scatters. On CPUs they are always counted
        together, because XLA:CPU makes all-reduces where GPUs make reduce-scatters.
      peak_bytes: peak memory; None for no limit.
      tolerance: fraction by which each number may be exceeded, or missed.
      small_bytes: bytes allowed beyond each number, for losses and norms.
      unbounded: axes without a limit on communication.
      host_state_bytes: bytes of the train state in the host's memory.
      at_least: as `communicated`, the bytes that a step must communicate, however few;
        a step that does not reduce its gradients communicates less. All-reduces and
        reduce-scatters are counted together. Not checked in a program that has loops
        of unknown trip counts.
      exposed_ms: milliseconds a step that kernels may wait for collectives, and for
        copies to and from the host, by the compiled schedule at assumed rates
        (`Explanation.details` shows them); None for no limit. Only of steps compiled
        for GPUs. `record` leaves it open.
    """

    state_bytes: int
    communicated: Mapping[str, Mapping[str, int]]
    peak_bytes: int | None = None
    tolerance: float = 0.05
    small_bytes: int = SMALL_BYTES
    unbounded: tuple[str, ...] = ()
    host_state_bytes: int = 0
    at_least: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    exposed_ms: float | None = None

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
        try:
            found: dict[str, Any] = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"budget: the text must be a JSON object ({error})"
            ) from None
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
        try:
            return as_kind(cls, found)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"budget: a value is of another type than Budget.as_json() writes "
                f"({error})"
            ) from None


class BudgetExceeded(AssertionError):  # noqa: N818 - states the failure, as pytest does
    """A compiled step holds or communicates more than its budget, or less than it must.

    Args:
      violations: what is exceeded, by how much, and by which leaves or operations.
    """

    def __init__(self, violations: Sequence[str]):
        self.violations = tuple(violations)
        super().__init__(
            "verify: the compiled step does not keep to its budget.\n\n"
            + "\n\n".join(self.violations)
        )


def record(measured: Measured) -> Budget:
    """The measured numbers as a budget, without what is below `small_bytes`.

    Its floor is the reductions over batch axes alone, however small.
    """
    small, communicated = measured.small_bytes, measured.communicated
    large = {
        axes: {kind: n for kind, n in kinds.items() if n > small}
        for axes, kinds in communicated.items()
    }
    reduced = {
        axes: merged_reductions(kinds).get(REDUCTION, 0)
        for axes, kinds in communicated.items()
        if set(axes.split(" x ")) <= set(BATCH_AXES) and measured.is_complete
    }
    return Budget(
        state_bytes=measured.state_bytes,
        communicated={axes: kinds for axes, kinds in large.items() if kinds},
        peak_bytes=measured.peak_bytes,
        small_bytes=small,
        host_state_bytes=measured.host_state_bytes,
        at_least={axes: {REDUCTION: n} for axes, n in reduced.items() if n},
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
        *_check_at_least(budget, measured),
        *_check_peak(budget, measured),
        *_check_exposed(budget, measured),
    ]


def _check_state(budget: Budget, measured: Measured) -> list[str]:
    held, allowed = measured.state_bytes, budget.state_bytes
    if held <= allowed * (1 + budget.tolerance):
        return []
    num_devices = math.prod(measured.mesh.values())
    shares = {leaf: -(-whole_bytes(leaf) // num_devices) for leaf in measured.leaves}
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
            named, moved = merged_reductions(named), merged_reductions(moved)
        for kind, number in moved.items():
            allowed = named.get(kind, 0)
            spare = max(budget.tolerance * allowed, budget.small_bytes)
            if number - allowed > spare:
                causes = _causes(measured.operations, axes, kind)
                found.append(_over_axis(axes, kind, number, allowed, causes))
    return found


def _check_at_least(budget: Budget, measured: Measured) -> list[str]:
    if not measured.is_complete:
        return []
    found = []
    for axes, kinds in budget.at_least.items():
        moved = merged_reductions(measured.communicated.get(axes, {}))
        for kind, least in merged_reductions(kinds).items():
            number = moved.get(kind, 0)
            if number < least * (1 - budget.tolerance):
                causes = _causes(measured.operations, axes, kind)
                found.append(_too_little(axes, kind, number, least, causes))
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


def _check_exposed(budget: Budget, measured: Measured) -> list[str]:
    seconds, allowed = measured.exposed_seconds, budget.exposed_ms
    if allowed is None or seconds is None or 1e3 * seconds <= allowed:
        return []
    return [
        _violation(
            f"exposed: kernels wait {1e3 * seconds:.1f} ms a step for collectives, by "
            "the compiled schedule at assumed rates, but the budget is "
            f"{allowed:g} ms.",
            _longest_waits(measured.operations),
            "A gather or a reduction for each layer hides behind the other layers "
            "(zero=3, scanned layers); larger micro-batches (accumulate=) give each "
            "more to hide behind; MeshShape(replica=...) keeps gathers inside a host. "
            "If it is intended, raise exposed_ms=.",
        )
    ]


def _longest_waits(operations: Iterable[Operation]) -> list[str]:
    """The operations that kernels wait for, equal ones merged, longest first."""
    waits: dict[Operation, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for each in operations:
        alike = dataclasses.replace(each, times=0, bytes=0, exposed_seconds=0.0)
        waits[alike][0] += each.times
        waits[alike][1] += each.exposed_seconds
    rows = sorted(waits.items(), key=lambda row: -row[1][1])
    rows = [(operation, row) for operation, row in rows if row[1] > 0]
    left = sum(seconds for _, (_, seconds) in rows[_SHOWN:])
    more = [f"and {len(rows) - _SHOWN} more, {1e3 * left:.1f} ms"] if left else []
    return [
        f"{1e3 * seconds:.1f} ms: "
        + dataclasses.replace(operation, times=int(times)).described
        for operation, (times, seconds) in rows[:_SHOWN]
    ] + more


def _over_axis(
    axes: str, kind: str, number: int, allowed: int, causes: Sequence[str]
) -> str:
    if allowed:
        than = f"but the budget is {allowed:,} ({number / allowed:.1f} times as much)."
    else:
        than = "which the budget does not name."
    return _violation(
        f"{axes}: {_named(kind)} moves {number:,} bytes a step, {than}",
        causes,
        "If it is an activation, constrain its sharding where it is computed: "
        'jaxpar.constrain(x, "data"). If it is intended, record a new budget '
        "(engine.budget()).",
    )


def _too_little(
    axes: str, kind: str, number: int, least: int, causes: Sequence[str]
) -> str:
    return _violation(
        f"{axes}: {_named(kind)} moves {number:,} bytes a step, but must move at least "
        f"{least:,}: gradients are not reduced as they should be.",
        causes,
        "Let the optimizer's reduction sum every gradient over data, and name in "
        "`communicated` what it sends; if it is intended, record a new budget "
        "(engine.budget()).",
    )


def _named(kind: str) -> str:
    return "all-reduce and reduce-scatter" if kind == REDUCTION else kind


def _causes(operations: Iterable[Operation], axes: str, kind: str) -> list[str]:
    """The operations of a kind over some axes, equal ones merged, largest first."""
    kinds = _REDUCTIONS if kind == REDUCTION else {kind}
    alike: dict[Operation, list[int]] = collections.defaultdict(lambda: [0, 0])
    for operation in operations:
        if operation.kind in kinds and " x ".join(operation.axes) == axes:
            entry = alike[
                dataclasses.replace(operation, times=0, bytes=0, exposed_seconds=0.0)
            ]
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


def merged_reductions(kinds: Mapping[str, int]) -> dict[str, int]:
    """All-reduces and reduce-scatters as one kind, if there are any."""
    others = {kind: n for kind, n in kinds.items() if kind not in _REDUCTIONS}
    number = sum(n for kind, n in kinds.items() if kind in _REDUCTIONS)
    return others | ({REDUCTION: number} if number else {})


def _violation(said: str, causes: Sequence[str], remedy: str) -> str:
    return "\n".join([said, *(f"  - {cause}" for cause in causes), f"  {remedy}"])


def _why(leaf: LeafReport, leaves: Iterable[LeafReport]) -> str:
    """The reason for a leaf's sharding: its own, or of the parameter it mirrors."""
    for row in leaves:
        mirrored = f"/{leaf.name}".endswith(f"/{row.name.removeprefix('params/')}")
        if row.why and mirrored and row.shape == leaf.shape:
            return f" ({row.why})"
    return ""
