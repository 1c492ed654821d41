"""Where did the time of traced steps go: by what a device did, and by module?"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxpar.compiled.modules import OTHER, OUTSIDE, Path, is_collective_kernel
from jaxpar.compiled.plain_text import as_plain_text
from jaxpar.compiled.timeline import Account, Interval, Span, account
from jaxpar.compiled.trace import Trace, TracedOp
from jaxpar.training.annotations import name_of
from jaxpar.training.module_table import ModuleRow, StepModules, as_json, as_table

_NOT_IN_STEPS = ("save", "evaluate", "restore")
_PARTS = {
    "compute": "compute",
    "communication": "exposed communication",
    "input": "input",
    "other": "other",
}
_WIDTH = 100
_MOST_SOURCES = 5


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the time of traced steps went; seconds are of one step on one device.

    Attributes:
      steps: the first and the last.
      devices: how many were traced.
      seconds: "compute", "communication" (exposed), "input" and "other".
      hidden: communication beside compute, which is a part of "compute".
      left_out: of the time between the steps, for evaluations and saves; not in
        `seconds`.
      rows: by module.
      sources: name and line -> seconds, of what belongs to no module; most first.
      unknown: of operations that are in no program of the step; a part of (other).
    """

    steps: tuple[int, int]
    devices: int
    seconds: Mapping[str, float]
    hidden: float
    left_out: float
    rows: Sequence[ModuleRow]
    sources: Mapping[str, float]
    unknown: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        """The summary as JSON values."""
        written = {**dataclasses.asdict(self), "rows": as_json(self.rows)}
        return {**written, "total": self.total}

    def text(self) -> str:
        """The summary as it is printed."""
        lines = as_plain_text(self._print_on, width=_WIDTH).splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def _print_on(self, console: Console) -> None:
        first, last = self.steps
        console.print(
            f"steps {first} to {last}: {1e3 * self.total:.2f} ms a step, "
            f"mean of {self.devices} devices",
            highlight=False,
        )
        console.print(self._parts())
        if not self.devices:
            console.print("The trace has no operations of devices that can be read.")
        idle = self.seconds["input"] + self.seconds["other"]
        console.print(as_table(self.rows, idle))
        for source, seconds in list(self.sources.items())[:_MOST_SOURCES]:
            line = f"{1e3 * seconds:.2f} ms in no module: {source}"
            console.print(line, markup=False, soft_wrap=True)
        if self.unknown:
            console.print(f"{1e3 * self.unknown:.2f} ms of (other) in other programs")

    def _parts(self) -> Table:
        table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("of a step")
        table.add_column("ms", justify="right")
        table.add_column("% of time", justify="right")
        for name, words in _PARTS.items():
            share = 100 * self.seconds[name] / (self.total or 1.0)
            table.add_row(words, f"{1e3 * self.seconds[name]:.2f}", f"{share:.1f}")
        table.add_row("hidden communication", f"{1e3 * self.hidden:.2f}", "in compute")
        table.add_row("evaluate and save", f"{1e3 * self.left_out:.2f}", "not counted")
        return table


def summarize(trace: Trace, modules: StepModules) -> Summary:
    """Summarize a trace of consecutive steps.

    Args:
      trace: with at least one step, at whose end the devices had done it.
      modules: of the step's programs.
    """
    steps = list(trace.steps)
    window = trace.steps[steps[0]][0], trace.steps[steps[-1]][1]
    left_out = [i for phase in _NOT_IN_STEPS for i in trace.host[name_of(phase)]]
    accounts = [
        account(
            _spans(ops, modules, left_out),
            window,
            waiting=trace.host[name_of("data")],
            left_out=left_out,
        )
        for ops in trace.devices.values()
    ]
    each = len(steps) * max(len(accounts), 1)
    by_path: dict[Path, float] = {}
    by_source: dict[str, float] = {}
    unknown = 0.0
    for (program, op), seconds in _sums(own.by_op for own in accounts).items():
        attribution = modules.attribution(program, op)
        path = attribution.path if attribution else OTHER
        by_path[path] = by_path.get(path, 0.0) + seconds / each
        if attribution is None:
            unknown += seconds / each
        elif path in OUTSIDE:
            source = attribution.source or "the compiler's own"
            by_source[source] = by_source.get(source, 0.0) + seconds / each
    return Summary(
        steps=(steps[0], steps[-1]),
        devices=len(accounts),
        seconds={name: _mean(accounts, name, each) for name in _PARTS},
        hidden=_mean(accounts, "hidden", each),
        left_out=_mean(accounts, "left_out", each),
        rows=modules.rows(by_path),
        sources=dict(sorted(by_source.items(), key=lambda item: -item[1])),
        unknown=unknown,
    )


def _spans(
    ops: Iterable[TracedOp], modules: StepModules, left_out: Sequence[Interval]
) -> list[Span]:
    """The operations of a device, without other programs' outside of the steps."""
    spans = []
    for op in ops:
        attribution = modules.attribution(op.program, op.op)
        name = op.program, op.op
        if attribution is None:
            if not any(start <= op.start < end for start, end in left_out):
                moves = is_collective_kernel(op.op)
                spans.append(Span(op.start, op.end, name, communicates=moves))
        elif not attribution.is_control:
            moves = attribution.communicates
            spans.append(Span(op.start, op.end, name, communicates=moves))
    return spans


def _sums(parts: Iterable[Mapping[Any, float]]) -> dict[Any, float]:
    found: dict[Any, float] = {}
    for part in parts:
        for name, seconds in part.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def _mean(accounts: Sequence[Account], name: str, each: int) -> float:
    return sum(getattr(own, name) for own in accounts) / each
