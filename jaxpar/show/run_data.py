"""What is known of a run: everything in its folder, read without running anything.

A run may have just started, may be running now, or may have been killed: any file may
be missing, and the last line of a log may be half written. What can't be read is
reported in `RunData.problems`, and the rest is shown.
"""

import array
import collections
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint.places import place_of
from jaxpar.show.series import Series
from jaxpar.training import goodput, record
from jaxpar.training.metrics import metric_name

METRICS, EVENTS, PLAN, SAMPLE = (
    "metrics.jsonl",
    "events.jsonl",
    "plan.json",
    "sample.txt",
)
MOST_EVENTS, MOST_SAMPLE = 2_000, 20_000
"""Events that are kept, the newest; characters of a sample."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
      step: its step.
      time: when it was saved, in seconds since 1970; None if unknown, in a bucket.
      num_bytes: of its files; None if unknown.
      metric: the number that was saved with it, or None.
      problem: why it can't be restored; empty if it can.
    """

    step: int
    time: float | None
    num_bytes: int | None = None
    metric: float | None = None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class RunData:
    """What a run's folder holds.

    Attributes:
      folder: the folder.
      name: to call it by.
      record: the content of ``run.json``; empty without one.
      series: name of a metric, as `metric_name` has it -> its numbers over steps;
        "time" is when they were logged.
      events: of ``events.jsonl``, the newest.
      num_events: how many there are.
      accounts: of its starts, by `jaxpar.training.goodput`.
      plan: of ``plan.json``, or None.
      sample: of ``sample.txt``; empty without one.
      saved: its checkpoints, by step.
      problems: what could not be read.
    """

    folder: Path
    name: str
    record: Mapping[str, Any]
    series: Mapping[str, Series]
    events: list[dict[str, Any]]
    num_events: int
    accounts: list[dict[str, Any]]
    plan: Mapping[str, Any] | None
    sample: str
    saved: list[Saved]
    problems: list[str]

    @property
    def config(self) -> dict[str, Any]:
        """The run's config; empty where it is unknown."""
        found = self.record.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return int(max((each.steps[-1] for each in self.series.values()), default=0))

    @property
    def total_steps(self) -> int | None:
        """The run's last step, by its config; None where it does not say."""
        found = self.config.get("steps")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def resumed(self) -> list[int]:
        """The steps at which later starts went on."""
        found = [each.get("resumed") for each in self.accounts[1:]]
        return [step for step in found if isinstance(step, int)]


def read_run(folder: str | os.PathLike[str]) -> RunData:
    """Read a run's folder.

    Args:
      folder: of the run.

    Raises:
      NotADirectoryError: if it is not a folder.
      FileNotFoundError: if no run has written to it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(
            f"RUN={str(folder)!r} is not a folder; give the folder of a run, such as "
            "runs/pretrain."
        )
    if not (folder / record.FILE).exists() and not (folder / METRICS).exists():
        raise FileNotFoundError(
            f"RUN={str(folder)!r} holds no run: it has neither {record.FILE} nor "
            f"{METRICS}. Give the folder that a run was started with (--out)."
        )
    problems: list[str] = []
    series, unread = _read_series(folder / METRICS)
    if unread:
        problems.append(f"{METRICS}: lines that are not records: {unread:,}")
    events, num_events = _read_events(folder / EVENTS)
    accounts = _read_json(folder / goodput.FILE, list, problems) or []
    known = _read_json(folder / record.FILE, dict, problems) or {}
    if not isinstance(known.get("history", []), list):
        problems.append(f"{record.FILE}: its history is damaged")
    return RunData(
        folder=folder,
        name=folder.resolve().name,
        record=known,
        series=series,
        events=events,
        num_events=num_events,
        accounts=[each for each in accounts if isinstance(each, dict)],
        plan=_read_plan(folder / PLAN, problems),
        sample=_read_sample(folder / SAMPLE),
        saved=_read_saved(record.checkpoints_of(folder, known), problems),
        problems=problems,
    )


def _read_series(path: Path) -> tuple[dict[str, Series], int]:
    """Read a log line by line, into arrays; and count lines that are not records."""
    columns: dict[str, tuple[array.array, array.array]] = {}
    unread = 0
    for line in _lines(path):
        found = _parsed(line)
        step = step_of(found) if isinstance(found, dict) else None
        if step is None:
            unread += 1
            continue
        for name, given in found.items():
            value = given if isinstance(given, float) else _to_float(given)
            if name != "step" and value is not None:
                if name not in columns:
                    columns[name] = (array.array("d"), array.array("d"))
                columns[name][0].append(step)
                columns[name][1].append(value)
    return {
        metric_name(name): _ordered(np.array(steps), np.array(values))
        for name, (steps, values) in columns.items()
    }, unread


def _ordered(steps: np.ndarray, values: np.ndarray) -> Series:
    """By step; of several values at a step, the last."""
    if (steps[1:] > steps[:-1]).all():
        return Series(steps, values)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    is_last = np.append(steps[1:] > steps[:-1], True)
    return Series(steps[is_last], values[is_last])


def _lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, which may not exist."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") or _parsed(line) is not None:
                    yield line


def _parsed(text: bytes) -> Any:
    """The value of a JSON text; None if it is not one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _to_float(value: Any) -> float | None:
    """A number, or a string of one such as "nan"; None for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def step_of(line: Mapping[str, Any]) -> float | None:
    """The step of a line of a log; None if it has none that is finite."""
    step = _to_float(line.get("step"))
    return step if step is not None and math.isfinite(step) else None


def _read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    newest: collections.deque[dict[str, Any]] = collections.deque(maxlen=MOST_EVENTS)
    count = 0
    for line in _lines(path):
        found = _parsed(line)
        if isinstance(found, dict):
            newest.append(found)
            count += 1
    return list(newest), count


def _read_json(path: Path, kind: type, problems: list[str]) -> Any:
    """A file's value; None without one, with a problem if it is of another kind."""
    if not path.exists():
        return None
    found = _parsed(path.read_bytes())
    if isinstance(found, kind):
        return found
    problems.append(f"{path.name} is damaged")
    return None


def _read_plan(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    """A plan; of a search, the plan of its best choice."""
    found = _read_json(path, dict, problems)
    if found is None or "bytes_per_device" in found:
        return found
    ranking = found.get("ranking")
    first = ranking[0] if isinstance(ranking, list) and ranking else None
    best = first.get("plan") if isinstance(first, dict) else None
    if not isinstance(best, dict):
        problems.append(f"{path.name} is not a plan of jaxpar plan --json")
        return None
    return best


def _read_sample(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(MOST_SAMPLE)


def _read_saved(folder: Path | str, problems: list[str]) -> list[Saved]:
    found = []
    try:
        place = place_of(folder)
        steps = place.steps()
    except (OSError, ValueError) as error:
        problems.append(f"checkpoints in {str(folder)!r} can't be listed: {error}")
        return []
    for number in sorted(steps):
        step = place.step(number)
        saved = Saved(number, step.saved_at(), problem="has no manifest")
        if steps[number]:
            try:
                manifest = step.manifest()
            except (ValueError, OSError) as error:
                saved = dataclasses.replace(saved, problem=str(error))
            else:
                saved = Saved(number, saved.time, manifest.num_bytes, manifest.metric)
        found.append(saved)
    return found


def distinct_names(runs: Sequence[RunData]) -> list[RunData]:
    """Give runs whose folders have one name the paths of these as names."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return list(runs)
    paths = [str(run.folder) for run in runs]
    apart = (
        paths
        if len(set(paths)) == len(paths)
        else [f"{name} ({at})" for at, name in enumerate(names, start=1)]
    )
    return [
        dataclasses.replace(run, name=name)
        for run, name in zip(runs, apart, strict=True)
    ]
