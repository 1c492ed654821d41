"""Which charts does a run have? Those of its metrics, in the order that people ask."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.show.chart import Chart, Line, Mark
from jaxpar.show.quantities import number
from jaxpar.show.run_data import RunData, step_of
from jaxpar.show.run_facts import as_text, step_seconds
from jaxpar.show.series import Series, smooth

COLOURS = ("first", "second")
MOST_CHARTS = 40
_FAINT = (
    "Faint lines are the logged numbers, strong ones their mean over a fiftieth of the "
    "run, and over five of them at least. Triangles are events, diamonds changed "
    "settings, circles later starts."
)
_FIRST = ("grad_norm", "learning_rate", "loss_scale", "skipped")
_LOSS, _HELDOUT = "train/loss", "eval/loss"
_WORKERS = {
    "step_seconds": ("Step time of workers", "s"),
    "data_seconds": ("Workers waiting for data", "s"),
    "memory_gb": ("Memory of workers", "GB"),
}
"""What every worker reports -> title and unit."""
_WORDS = ("max", "median", "min")
_DOTS_UP_TO = 12
"""Fewer points than this are drawn as dots, and more as lines."""
_MOST_DOTS = 80
"""Evaluations up to which each is drawn as a dot."""
_MS_BELOW = 0.1
"""Seconds: times below are drawn in milliseconds."""
_NOISY_FROM = 8.0
"""A curve is smoothed if it goes up and down by so many times its height."""


@dataclasses.dataclass(frozen=True)
class ChartGroup:
    """Charts under one heading.

    Attributes:
      heading: the heading; empty where the chart's title is enough.
      charts: the charts.
      note: what is to be said beside them; may be empty.
    """

    heading: str
    charts: Sequence[Chart]
    note: str = ""


def groups(runs: Sequence[RunData]) -> list[ChartGroup]:
    """The charts of one run, or of two laid over each other."""
    loss = _loss_chart(runs)
    training, note = _training(runs)
    found = [
        ChartGroup("", [loss] if loss else [], _FAINT if loss else ""),
        ChartGroup("Training", training, note),
        ChartGroup("Evaluations", list(_plain(runs, "eval/", leave_out=(_HELDOUT,)))),
        ChartGroup("Rates", *_rates(runs)),
        ChartGroup("Memory", _memory(runs)),
    ]
    return [group for group in found if group.charts or group.note]


def span(runs: Sequence[RunData]) -> tuple[float, float]:
    """The first and last step that any of the runs logged."""
    steps = [
        (each.steps[0], each.steps[-1]) for run in runs for each in run.series.values()
    ]
    if not steps:
        return 0.0, 1.0
    first, last = min(a for a, _ in steps), max(b for _, b in steps)
    return float(0 if 0 < first < 0.05 * last else first), float(last)


def marks(run: RunData, *, named: bool = False) -> list[Mark]:
    """What happened to a run: events, changes of its settings, later starts.

    Args:
      run: the run.
      named: begin each text with the run's name.
    """
    found = []
    for event in run.events:
        step = step_of(event)
        if step is not None:
            found.append(Mark(step, event_text(event), "bad"))
    loss = run.series.get(_LOSS)
    if loss is not None:
        known = {mark.step for mark in found}
        for step in loss.steps[~np.isfinite(loss.values)][:1000]:
            if step not in known:
                found.append(Mark(float(step), "the loss is not finite", "bad"))
    for line in history(run):
        changed = ", ".join(change_texts(line))
        found.append(Mark(step_of(line) or 0.0, f"changed: {changed}", "changed"))
    found += [Mark(float(step), "reopened", "opened") for step in run.resumed]
    if named:
        found = [dataclasses.replace(m, text=f"{run.name} {m.text}") for m in found]
    return sorted(found, key=lambda mark: mark.step)


def event_text(event: Mapping[str, Any]) -> str:
    """An event in a line: what happened, and what is known of it."""
    known = {"event", "step", "time", "why", "batch_xxh3"}
    rest = [
        f"{name.replace('_', ' ')} {as_text(value)}"
        for name, value in event.items()
        if name not in known
    ]
    parts = [str(event["why"])] if event.get("why") else []
    parts += [", ".join(rest)] if rest else []
    return f"{event.get('event', 'event')}: {'; '.join(parts)}"


def history(run: RunData) -> list[Mapping[str, Any]]:
    """The changes of a run's settings, oldest first."""
    found = run.record.get("history")
    kept = found if isinstance(found, list) else []
    return [each for each in kept if isinstance(each, dict)]


def change_texts(line: Mapping[str, Any]) -> list[str]:
    """The changes of one line of the history, as "steps 40 -> 60"."""
    changed = line.get("changed")
    return [
        f"{name} {as_text(pair[0])} → {as_text(pair[1])}"
        for name, pair in (changed.items() if isinstance(changed, dict) else ())
        if isinstance(pair, list) and len(pair) == 2
    ]


def _loss_chart(runs: Sequence[RunData]) -> Chart | None:
    lines = []
    for at, run in enumerate(runs):
        train, heldout = run.series.get(_LOSS), run.series.get(_HELDOUT)
        own = "" if len(runs) == 1 else f"{run.name} "
        if train is not None:
            lines += _lines(f"{own}train", train, COLOURS[at], smoothed=True)
        if heldout is not None:
            colour = COLOURS[at if len(runs) > 1 else 1]
            look = "dots" if len(heldout) <= _MOST_DOTS else "line"
            lines.append(Line(f"{own}held-out", heldout, colour, look))
    if not _has_numbers(lines):
        return None
    found = [mark for run in runs for mark in marks(run, named=len(runs) > 1)]
    return Chart("Loss", lines, found, tall=True)


def _training(runs: Sequence[RunData]) -> tuple[list[Chart], str]:
    """Charts of what the step reports, and the metrics that never change, as text."""
    names = _names(runs, "train/")
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    charts, constant = [], []
    for name in names:
        full = f"train/{name}"
        values = [run.series[full].values for run in runs if full in run.series]
        only = np.unique(np.concatenate(values))
        if name == "loss":
            continue
        if len(only) == 1:
            constant.append(f"{name} {number(only[0])}")
        else:
            charts += _chart_of(runs, full, name.replace("_", " "))
    kept = charts[:MOST_CHARTS]
    notes = [f"Constant: {', '.join(constant)}."] if constant else []
    if len(charts) > len(kept):
        others = ", ".join(chart.title for chart in charts[MOST_CHARTS:])
        notes.append(f"Not drawn, for there are too many: {others}.")
    return kept, " ".join(notes)


def _rates(runs: Sequence[RunData]) -> tuple[list[Chart], str]:
    charts = list(_chart_of(runs, "perf/tokens_per_second", "Tokens/s", from_zero=True))
    found = [(run, *step_seconds(run)) for run in runs]
    given = [(run, series) for run, series, _ in found if len(series)]
    charts += _chart(runs, "Step time", given, unit="s", from_zero=True)
    charts += _chart_of(
        runs, "perf/data_seconds", "Waiting for data", unit="s", from_zero=True
    )
    charts += _chart_of(runs, "perf/mfu", "MFU", from_zero=True)
    charts += _workers(runs, ("step_seconds", "data_seconds"))
    derived = any(len(series) and not measured for _, series, measured in found)
    note = (
        "The log has no step times: they are the time from one record to the next, "
        "with saves and evaluations."
    )
    return charts, note if derived else ""


def _memory(runs: Sequence[RunData]) -> list[Chart]:
    drawn = {"unit": "GB", "from_zero": True}
    return [
        *_chart_of(runs, "perf/memory_gb", "Memory of a device", **drawn),
        *_workers(runs, ("memory_gb",)),
    ]


def _workers(runs: Sequence[RunData], fields: Iterable[str]) -> Iterator[Chart]:
    """The slowest, the median and the fastest worker, where there are several."""
    for field in fields:
        lines = []
        title, unit = _WORKERS[field]
        for at, run in enumerate(runs):
            own = "" if len(runs) == 1 else f"{run.name} "
            for word, colour in zip(_WORDS, ("second", "first", "third"), strict=True):
                series = run.series.get(f"workers/{field}_{word}")
                if series is not None and (len(runs) == 1 or word == "max"):
                    shown = COLOURS[at] if len(runs) > 1 else colour
                    lines.append(Line(f"{own}{word}", series, shown))
        if _has_numbers(lines):
            yield Chart(title, lines, unit=unit, from_zero=True)


def _plain(
    runs: Sequence[RunData], prefix: str, leave_out: Sequence[str]
) -> Iterator[Chart]:
    for name in _names(runs, prefix)[:MOST_CHARTS]:
        if f"{prefix}{name}" not in leave_out:
            yield from _chart_of(runs, f"{prefix}{name}", name.replace("_", " "))


def _chart_of(
    runs: Sequence[RunData],
    name: str,
    title: str,
    *,
    unit: str = "",
    from_zero: bool = False,
) -> Iterator[Chart]:
    """A metric of the runs that have it; nothing if none has a finite value."""
    given = [(run, run.series[name]) for run in runs if name in run.series]
    yield from _chart(runs, title, given, unit=unit, from_zero=from_zero)


def _chart(
    runs: Sequence[RunData],
    title: str,
    given: Iterable[tuple[RunData, Series]],
    *,
    unit: str,
    from_zero: bool,
) -> Iterator[Chart]:
    found = [(run, series.finite()) for run, series in given]
    found = [(run, series) for run, series in found if len(series)]
    highest = max((float(series.values.max()) for _, series in found), default=0.0)
    if unit == "s" and highest < _MS_BELOW:
        unit = "ms"
        found = [(run, Series(own.steps, 1e3 * own.values)) for run, own in found]
    noisy = any(_is_noisy(series.values) for _, series in found)
    lines = []
    for run, series in found:
        at = next(i for i, each in enumerate(runs) if each is run)
        label = run.name if len(runs) > 1 else ""
        lines += _lines(label, series, COLOURS[at], smoothed=noisy)
    if lines:
        yield Chart(title, lines, unit=unit, from_zero=from_zero)


def _lines(label: str, series: Series, colour: str, *, smoothed: bool) -> list[Line]:
    """A line; dots if there are few points; the points and a smoothed line."""
    if len(series) < _DOTS_UP_TO:
        return [Line(label, series, colour, "dots")]
    if not smoothed:
        return [Line(label, series, colour)]
    return [
        Line(label, series, colour, "faint"),
        Line(label, smooth(series), colour, note="smoothed"),
    ]


def _is_noisy(values: np.ndarray) -> bool:
    """Whether a curve goes up and down many times its height."""
    if len(values) < 3:
        return False
    low, high = np.percentile(values, (2, 98))
    ups_and_downs = np.abs(np.diff(np.clip(values, low, high))).sum()
    return bool(ups_and_downs > _NOISY_FROM * (high - low) > 0)


def _names(runs: Sequence[RunData], prefix: str) -> list[str]:
    """Names of the runs' metrics with a prefix, without it, sorted."""
    found = {name for run in runs for name in run.series if name.startswith(prefix)}
    return sorted(name.removeprefix(prefix) for name in found)


def _has_numbers(lines: Iterable[Line]) -> bool:
    return any(np.isfinite(line.series.values).any() for line in lines)
