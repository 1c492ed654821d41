"""How much of a run's time went into useful steps, and what took the rest?

Every start of a run writes its own account to ``goodput.json`` and updates it while it
runs, so that a killed start has one too.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from jaxpar.launch.heartbeat import own_heartbeat
from jaxpar.launch.lease import require_lease
from jaxpar.launch.own_files import attempted, read_json, write_whole
from jaxpar.training.annotations import Annotations

FILE = "goodput.json"

_WRITE_SECONDS = 1.0
_LARGEST = 1e15
WORDS = {
    "step": "useful steps",
    "lost": "repeated steps",
    "start": "start",
    "restore": "restore",
    "compile": "compile (first steps)",
    "data": "waiting for data",
    "save": "blocked by saves",
    "evaluate": "evaluations",
    "replay": "replays of steps",
    "down": "between starts",
    "end": "the end",
}


class Clock:
    """Accounts for the time of this start of a run, and writes its heartbeat.

    Args:
      folder: of the run.

    Attributes:
      annotations: of its phases, for profilers.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._heartbeat = own_heartbeat()
        self.annotations = Annotations()
        self._writes = jax.process_index() == 0
        self._earlier = read_account(folder) if self._writes else []
        created = psutil.Process().create_time()
        # Another call of train in this process has accounted for the time until then.
        ends = [each["ended"] for each in self._earlier if each["ended"] > created]
        self._began = max(ends, default=created)
        self._seconds = {"start": time.time() - self._began}
        self._phase, self._since = "start", time.monotonic()
        self._written = -_WRITE_SECONDS
        self._resumed: int | None = None
        self._step: int | None = None
        self._marks: dict[int, float] = {}

    def enter(self, phase: str, step: int | None = None) -> None:
        """Enter a phase.

        Args:
          phase: one of `jaxpar.launch.heartbeat.PHASES`.
          step: the current step; None for the one before.
        """
        self._heartbeat.enter(phase, step)
        self.annotations.enter(phase, step)
        self._count()
        self._phase = phase
        self._step = self._step if step is None else step
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self.write()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase within the block, and return to the previous one after it."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def spent(self, phase: str) -> float:
        """Seconds that this start has spent in a phase so far."""
        self._count()
        return self._seconds.get(phase, 0.0)

    def saved(self, step: int) -> None:
        """Record that a step was saved: the steps until then are not repeated."""
        self._count()
        self._marks[step] = self._seconds.get("step", 0.0)

    def resume(self, step: int) -> None:
        """Continue from a step: at the start, or after a rollback."""
        self._count()
        if self._resumed is None:
            self._resumed = step
        else:
            done = self._seconds.get("step", 0.0)
            lost = done - seconds_at(self._account(), step)
            self._seconds["step"] = done - lost
            self._seconds["lost"] = self._seconds.get("lost", 0.0) + lost
        self._marks = {s: x for s, x in self._marks.items() if s <= step}
        self._step = step
        self._heartbeat.resume(step)

    def write(self) -> None:
        """Write the account, on process 0."""
        if not self._writes:
            return
        self._count()
        self._written = time.monotonic()
        accounts = json.dumps([*self._earlier, self._account()])

        def write() -> None:
            require_lease(self._path)
            write_whole(self._path, accounts)

        attempted(write, self._path)

    def _count(self) -> None:
        now = time.monotonic()
        spent = self._seconds.get(self._phase, 0.0) + now - self._since
        self._seconds[self._phase], self._since = spent, now

    def _account(self) -> dict[str, Any]:
        return {
            "began": self._began,
            "ended": time.time(),
            "seconds": dict(self._seconds),
            "resumed": self._resumed,
            "step": self._step,
            "marks": sorted(self._marks.items()),
        }


def read_account(folder: Path) -> list[dict[str, Any]]:
    """Read the accounts of a run's starts, oldest first; none where it is damaged."""
    found = read_json(folder / FILE)
    return found if is_account(found) else []


def is_account(value: Any) -> bool:
    """Whether the content of a file is accounts of a run's starts."""
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and all(_is_number(each.get(name)) for name in ("began", "ended"))
        and all(_is_step(each.get(name, "")) for name in ("resumed", "step"))
        and isinstance(each.get("seconds"), dict)
        and all(map(_is_number, each["seconds"].values()))
        and isinstance(each.get("marks"), list)
        and all(map(_is_mark, each["marks"]))
        for each in value
    )


def _is_number(value: Any) -> bool:
    is_number = type(value) in (int, float)
    return is_number and -_LARGEST < value < _LARGEST  # Nor NaN.


def _is_step(value: Any) -> bool:
    return value is None or (type(value) is int and _is_number(value))


def _is_mark(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and _is_step(value[0] or 0) and all(map(_is_number, value))


def seconds_at(account: Mapping[str, Any], step: int) -> float:
    """Seconds that a start had spent in steps when it reached a step.

    Args:
      account: of the start.
      step: between the one that it resumed from and its last.

    Returns:
      The marked value; between marks, interpolated over the steps.
    """
    done = account["seconds"].get("step", 0.0)
    first = account["resumed"] if account["resumed"] is not None else step
    last = account["step"] if account["step"] is not None else first
    marks = {first: 0.0, last: done} | {int(s): x for s, x in account["marks"]}
    if step in marks:
        return marks[step]
    below = max((s for s in marks if s < step), default=None)
    above = min((s for s in marks if s > step), default=None)
    if below is None:
        return 0.0
    if above is None:
        return done
    share = (step - below) / (above - below)
    return marks[below] + share * (marks[above] - marks[below])


def total(accounts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the accounts of a run's starts.

    Args:
      accounts: oldest first; at least one.

    Returns:
      Seconds of each kind; their sum is the time from the first start to now.
    """
    sums: dict[str, float] = {}
    for account, later in zip(accounts, [*accounts[1:], None], strict=True):
        seconds = dict(account["seconds"])
        if later is not None:
            seconds["down"] = max(0.0, later["began"] - account["ended"])
            if later["resumed"] is not None:
                done = seconds.get("step", 0.0)
                kept = min(done, seconds_at(account, later["resumed"]))
                seconds["step"] = kept
                seconds["lost"] = seconds.get("lost", 0.0) + done - kept
        for kind, spent in seconds.items():
            sums[kind] = sums.get(kind, 0.0) + spent
    return sums


def show(folder: Path, console: Console) -> None:
    """Print the account of a run over all its starts."""
    accounts = read_account(folder)
    if not accounts:
        return
    sums = total(accounts)
    whole = sum(sums.values())
    starts = f"{len(accounts)} starts" if len(accounts) > 1 else "1 start"
    table = Table(
        f"goodput {sums.get('step', 0.0) / whole:.1%}, {starts}",
        box=box.SIMPLE,
        title_justify="left",
    )
    table.add_column("s", justify="right")
    table.add_column("%", justify="right")
    for kind in [*WORDS, *sorted(set(sums) - set(WORDS))]:
        if sums.get(kind, 0.0) > 0:
            spent = sums[kind]
            name = WORDS.get(kind, kind)
            table.add_row(name, f"{spent:.1f}", f"{100 * spent / whole:.1f}")
    table.add_row("all", f"{whole:.1f}", "100")
    console.print(table)
