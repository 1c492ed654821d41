"""How is a run shared: as one page of its curves, its numbers and its settings.

Two runs are on one page, with their curves laid over each other.
"""

import html
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxpar.planner.sections import quantity
from jaxpar.show.chart import draw_chart
from jaxpar.show.hover import SCRIPT
from jaxpar.show.hover import STYLE as HOVER_STYLE
from jaxpar.show.page import MOODS, SUFFIXES, frame, table
from jaxpar.show.plotting import check_file
from jaxpar.show.quantities import duration, moment
from jaxpar.show.run_charts import COLOURS, change_texts, event_text, groups, history
from jaxpar.show.run_charts import span as span_of
from jaxpar.show.run_data import RunData
from jaxpar.show.run_facts import (
    goodput_sums,
    headline_facts,
    plan_command,
    plan_rows,
    settings,
    state_of,
)
from jaxpar.show.run_style import STYLE
from jaxpar.training.goodput import WORDS

POINTS, MOST_POINTS = 600, 30_000
"""Points of a line, at most; of all lines together, at most."""
MOST_ROWS = 100
"""Events in the table, at most: the newest."""


def write_report(runs: Sequence[RunData], path: Path) -> None:
    """Write the page of one run or two.

    Args:
      runs: by `jaxpar.show.run_data.read_run`.
      path: the file to write: .html or .htm.

    Raises:
      ValueError: if the suffix is not one of these.
      FileNotFoundError: if its folder does not exist.
      OSError: if `path` can't be written.
    """
    check_file(path, SUFFIXES, flag="--out")
    path.write_text(as_html(runs, time.time()), encoding="utf-8")


def as_html(runs: Sequence[RunData], now: float) -> str:
    """The page that `write_report` writes, at a time in seconds since 1970."""
    title = " and ".join(run.name for run in runs)
    body = [
        f"<h1>{html.escape(title)}</h1>\n",
        '<div class="heads">\n',
        *(_head(run, at, runs, now) for at, run in enumerate(runs)),
        "</div>\n",
        _differences(runs),
        _charts(runs),
        _goodput(runs),
        _events(runs),
        _changes(runs),
        *(_plan(run, runs) for run in runs),
        *(_sample(run, runs) for run in runs),
        _checkpoints(runs),
        _settings(runs),
        f"<footer>Written by jaxpar report on {moment(now)} UTC; all times are UTC."
        f"</footer>\n<script>{SCRIPT}</script>\n",
    ]
    style = STYLE + HOVER_STYLE
    return frame(f"Run: {title}", "".join(body), style=style, width="1080px")


def _head(run: RunData, at: int, runs: Sequence[RunData], now: float) -> str:
    """A run's state, and the numbers to know first."""
    state = state_of(run, now)
    why = f": {html.escape(state.why)}" if state.why else ""
    text = f'<span class="{MOODS[state.is_good]}">{state.word}</span>{why}'
    if len(runs) > 1:
        name = html.escape(run.name)
        text = f'<i class="key {COLOURS[at]}"></i><b>{name}</b> {text}'
    model = [f"model {run.config['model']}"] if "model" in run.config else []
    where = html.escape(" · ".join([*model, str(run.folder)]))
    facts = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in headline_facts(run).items()
    )
    problems = "".join(
        f'<p class="over">{html.escape(each)}.</p>\n' for each in run.problems
    )
    return (
        f'<div><p class="state">{text}</p>\n<p class="aside">{where}</p>\n{problems}'
        f"<dl>{facts}</dl></div>\n"
    )


def _differences(runs: Sequence[RunData]) -> str:
    """The settings in which two runs differ."""
    if len(runs) < 2:
        return ""
    rows = [row for row in _setting_rows(runs) if len(set(row[1:])) > 1]
    if not rows:
        return _section("What differs", "<p>No setting.</p>\n")
    return _section("What differs", table(_head_of("setting", runs), rows, words=3))


def _charts(runs: Sequence[RunData]) -> str:
    found = groups(runs)
    lines = sum(len(chart.lines) for group in found for chart in group.charts)
    points = max(100, min(POINTS, MOST_POINTS // max(lines, 1)))
    text = "" if found else "<p>Nothing has been logged yet.</p>\n"
    for group in found:
        drawn = "".join(
            draw_chart(chart, span_of(runs), points) for chart in group.charts
        )
        note = f'<p class="aside">{html.escape(group.note)}</p>\n' if group.note else ""
        text += _section(group.heading, f'<div class="charts">{drawn}</div>\n{note}')
    return text


def _goodput(runs: Sequence[RunData]) -> str:
    """Where the time of all starts went: a bar for each run, and a table."""
    found = [goodput_sums(run) for run in runs]
    if not any(found):
        return ""
    kinds = dict.fromkeys([*WORDS, *(kind for sums in found for kind in sums)])
    kinds = [kind for kind in kinds if any(_is_seen(sums, kind) for sums in found)]
    rows = [
        (_word(kind), *(cell for sums in found for cell in _spent(sums, kind)))
        for kind in kinds
    ]
    whole = [
        (duration(sum(sums.values())), "100%") if sums else ("-", "-") for sums in found
    ]
    rows.append(("all", *(cell for pair in whole for cell in pair)))
    names = [run.name if len(runs) > 1 else "time" for run in runs]
    head = ("", *(cell for name in names for cell in (name, "share")))
    keys = "".join(
        f'<span><i class="{_colour(kind)}"></i>{html.escape(_word(kind))}</span>'
        for kind in kinds
    )
    bars = "".join(
        _bar(run, runs, sums) for run, sums in zip(runs, found, strict=True) if sums
    )
    legend = f'<p class="kinds" aria-hidden="true">{keys}</p>\n'
    return _section("Goodput", bars + legend + table(head, rows))


def _bar(run: RunData, runs: Sequence[RunData], sums: dict[str, float]) -> str:
    """The kinds of a run's time, as shares of a bar."""
    whole = sum(sums.values())
    pieces = "".join(
        f'<i class="{_colour(kind)}" style="width:{spent / whole:.3%}" '
        f'title="{html.escape(_word(kind))} {spent / whole:.1%}"></i>'
        for kind, spent in sums.items()
        if _is_seen(sums, kind)
    )
    name = f"<b>{html.escape(run.name)}</b> " if len(runs) > 1 else ""
    starts = f"{len(run.accounts)} start{'s' * (len(run.accounts) != 1)}"
    return (
        f"<p>{name}{sums.get('step', 0.0) / whole:.1%} useful steps, {starts}</p>\n"
        f'<div class="bar" aria-hidden="true">{pieces}</div>\n'
    )


def _is_seen(sums: dict[str, float], kind: str) -> bool:
    """Whether a kind's share is not 0.0%."""
    return sums.get(kind, 0.0) >= 5e-4 * sum(sums.values()) > 0


def _colour(kind: str) -> str:
    """A class of the style; kinds that it does not know look like the end."""
    return kind if kind in WORDS else "end"


def _word(kind: str) -> str:
    return WORDS.get(kind, kind)


def _spent(sums: dict[str, float], kind: str) -> tuple[str, str]:
    if kind not in sums:
        return "-", "-"
    return duration(sums[kind]), f"{sums[kind] / sum(sums.values()):.1%}"


def _events(runs: Sequence[RunData]) -> str:
    rows, left = [], 0
    for run in runs:
        left += run.num_events - len(run.events[-MOST_ROWS:])
        for event in run.events[-MOST_ROWS:]:
            when = event.get("time")
            shown = moment(when) if isinstance(when, int | float) else "-"
            step, text = str(event.get("step", "-")), event_text(event)
            rows.append((*_own(run, runs), step, shown, *text.split(": ", 1)))
    if not rows:
        return _section(
            "Events", "<p>None: no bad step, no failed save, no stop.</p>\n"
        )
    head = (*_run_column(runs), "step", "when", "event", "what")
    note = f'<p class="aside">{left:,} earlier ones are left out.</p>\n' if left else ""
    return _section("Events", note + table(head, rows, words=len(head)))


def _changes(runs: Sequence[RunData]) -> str:
    rows = [
        (
            *_own(run, runs),
            str(line.get("step") or 0),
            str(line.get("time", "-"))[:16].replace("T", " "),
            "; ".join(change_texts(line)),
        )
        for run in runs
        for line in history(run)
    ]
    if not rows:
        return ""
    head = (*_run_column(runs), "step", "when", "what changed")
    return _section("Changes of settings", table(head, rows, words=len(head)))


def _plan(run: RunData, runs: Sequence[RunData]) -> str:
    """What a plan predicted against what was measured, or how to get one."""
    of = f" of {run.name}" if len(runs) > 1 else ""
    heading = f"Plan against measured{of}"
    if run.plan is None:
        command = html.escape(plan_command(run))
        return _section(
            heading,
            "<p>There is no plan in the run's folder; this writes one, for TARGET such "
            f"as h200:1x8:</p>\n<pre>{command}</pre>\n",
        )
    target, devices = run.plan.get("target", "?"), run.plan.get("num_devices", "?")
    text = f'<p class="aside">Planned for {html.escape(f"{target}, {devices}")} '
    text += "devices; measured are the median step and the highest memory.</p>\n"
    head = ("", "planned", "measured", "measured / planned")
    return _section(heading, text + table(head, plan_rows(run)))


def _sample(run: RunData, runs: Sequence[RunData]) -> str:
    if not run.sample:
        return ""
    of = f" of {run.name}" if len(runs) > 1 else ""
    if not run.sample.strip():
        return _section(f"Sample{of}", "<p>Only white space.</p>\n")
    return _section(f"Sample{of}", f"<pre>{html.escape(run.sample)}</pre>\n")


def _checkpoints(runs: Sequence[RunData]) -> str:
    rows = [
        (
            *_own(run, runs),
            str(saved.step),
            "-" if saved.time is None else moment(saved.time),
            saved.problem,
            "-" if saved.num_bytes is None else quantity(saved.num_bytes, "B"),
            "-" if saved.metric is None else f"{saved.metric:.6g}",
        )
        for run in runs
        for saved in run.saved
    ]
    head = (*_run_column(runs), "step", "saved", "", "size", "metric")
    text = table(head, rows, words=len(head) - 2) if rows else "<p>None.</p>\n"
    return _section("Checkpoints", text)


def _settings(runs: Sequence[RunData]) -> str:
    """Config, versions, command and commit; the environment that a run was in."""
    rows = list(_setting_rows(runs))
    if not rows:
        return ""
    head = _head_of("setting", runs)
    return _section("Settings", table(head, rows, words=len(head)))


def _setting_rows(runs: Sequence[RunData]) -> Iterable[tuple[str, ...]]:
    found = [settings(run) for run in runs]
    for name in dict.fromkeys(name for each in found for name in each):
        yield (name, *(each.get(name, "-") for each in found))


def _head_of(first: str, runs: Sequence[RunData]) -> tuple[str, ...]:
    return (first, *(run.name if len(runs) > 1 else "value" for run in runs))


def _run_column(runs: Sequence[RunData]) -> tuple[str, ...]:
    return ("run",) if len(runs) > 1 else ()


def _own(run: RunData, runs: Sequence[RunData]) -> tuple[str, ...]:
    return (run.name,) if len(runs) > 1 else ()


def _section(heading: str, body: str) -> str:
    return f"<h2>{html.escape(heading)}</h2>\n{body}" if heading else body
