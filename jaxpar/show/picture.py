"""How is a plan drawn: one picture with a panel for each section that has numbers."""

import collections
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxpar.planner.plan import Plan
from jaxpar.planner.roofline import Estimate
from jaxpar.planner.sections import (
    Piece,
    headline,
    memory_pieces,
    quantity,
    sections,
    time_pieces,
)
from jaxpar.show.plotting import (
    INK,
    MUTED,
    check_path,
    import_matplotlib,
    new_figure,
    save,
)
from jaxpar.show.schedule import draw_schedule

WIDTH, HEADING = 8.0, 0.35
"""Inches: the picture, a heading."""
RED, LINKS = "#b3261e", "#c9733b"
MOODS = {None: INK, True: "#1a7f4b", False: RED}
"""Whether a finding is good news -> its colour."""
MOST_ROWS, MOST_LETTERS = 10, 60
DERIVED = (
    "hatched: derived (closed forms, and the rest of the temporaries); solid, and "
    "the peak: the compiler's"
)


def draw(plan: Plan, path: Path) -> None:
    """Draw a plan: memory, traffic, the estimate and the pipeline, where known.

    Args:
      plan: the plan.
      path: the file to write: .png, .svg or .pdf.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      ValueError: if the suffix is not one of these.
      OSError: if `path` can't be written.
    """
    check_path(path)
    drawn, found = panels(plan), sections(plan)
    first, second = headline(plan)
    heights = [HEADING] + [
        HEADING + (drawn[each.name][0] if each.name in drawn else 0) for each in found
    ]
    left = {"x": 0.015, "ha": "left"}
    with new_figure(WIDTH, HEADING + sum(heights)) as figure:
        figure.suptitle(first, fontsize=11, **left)
        top, *parts = figure.subfigures(len(heights), height_ratios=heights)
        top.suptitle(second, color=MUTED, fontweight="normal", **left)
        for part, section in zip(parts, found, strict=True):
            text = f"{section.heading} — {section.finding}"
            part.suptitle(text, color=MOODS[section.fits], **left)
            if section.name in drawn:
                drawn[section.name][1](part)
        save(figure, path, path.suffix[1:].lower())


def as_svg(plan: Plan, name: str) -> str:
    """Draw one of `panels` as ``<svg>``; its ids start with the name."""
    written = io.StringIO()
    inches, paint = panels(plan)[name]
    with new_figure(WIDTH, inches) as figure:
        paint(figure)
        save(figure, written, "svg")
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r' xmlns(:xlink)?="[^"]*"| version="1.1"', "", text)


def panels(plan: Plan) -> dict[str, tuple[float, Callable[[Any], None]]]:
    """Section -> inches of height and painter of a figure, where there are numbers."""
    found: dict[str, tuple[float, Callable[[Any], None]]] = {}
    found["memory"] = (1.6, lambda figure: _memory(figure, plan))
    rows, times = traffic_rows(plan), plan.estimate
    if rows:
        found["traffic"] = (
            0.4 + 0.2 * len(rows),
            lambda figure: _traffic(figure, rows),
        )
    if times is not None:
        found["time"] = (1.1, lambda figure: _time(figure, times))
    schedule = plan.schedule
    if schedule is not None:
        found["pipeline"] = (
            0.8 + min(0.26 * schedule.num_stages, 4.0),
            lambda figure: draw_schedule(
                figure, schedule, plan.schedule_times, 7.0, "forwards of one stage"
            ),
        )
    return found


def traffic_rows(plan: Plan) -> list[tuple[str, int, int]]:
    """(collective, bytes that a device sends, times), most first, the least summed."""
    sent, times = collections.Counter[str](), collections.Counter[str]()
    for row in plan.program.collectives:
        over = f" over {' x '.join(row.axes)}" if row.axes else ""
        name = f"{row.kind}{over}, {row.dtype}"
        sent[name] += row.sent_bytes
        times[name] += row.count
    rows = [(name, number, times[name]) for name, number in sent.most_common()]
    others = rows[MOST_ROWS - 1 :]
    if len(others) > 1:
        summed = (sum(row[1] for row in others), sum(row[2] for row in others))
        rows = [*rows[: MOST_ROWS - 1], (f"{len(others)} others", *summed)]
    return rows


def _memory(figure: Any, plan: Plan) -> None:
    pieces, limit, peak = (
        memory_pieces(plan),
        plan.device_memory_bytes,
        plan.memory.peak,
    )
    axes = _stack(figure, pieces, "B")
    axes.axvline(peak, color=INK, label=f"peak {quantity(peak, 'B')}")
    if limit is not None:
        text, colour = f"device memory {quantity(limit, 'B')}", MOODS[plan.fits]
        axes.axvline(limit, color=colour, linestyle="--", label=text)
    whole = sum(piece.value for piece in pieces)
    span = 1.01 * max(whole, peak, limit or 0)
    if plan.fits is False:
        axes.axvspan(limit, span, color=RED, alpha=0.09, linewidth=0, zorder=0)
    apart = "; not all live at once" if whole > 1.01 * peak else ""
    axes.set(xlim=(0, span), ylim=(-0.4, 0.6))
    axes.set_xlabel(DERIVED + apart, loc="left")
    figure.legend(loc="outside lower left", ncols=3)


def _traffic(figure: Any, rows: list[tuple[str, int, int]]) -> None:
    axes = figure.subplots()
    names, sent, times = zip(*rows, strict=True)
    bars = axes.barh(range(len(rows)), sent, height=0.66, color=LINKS)
    axes.set_yticks(range(len(rows)), [_cut(name) for name in names])
    axes.invert_yaxis()
    labels = [
        f"{quantity(n, 'B')}, {count:,} time{'s' * (count != 1)}"
        for n, count in zip(sent, times, strict=True)
    ]
    axes.bar_label(bars, labels, padding=3)
    _tick(axes, "B")


def _cut(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 3] + "..."


def _time(figure: Any, found: Estimate) -> None:
    axes = _stack(figure, time_pieces(found), "s")
    beside = max(found.links_seconds - found.exposed_seconds, 0.0)
    axes.set_xlim(0, found.step_seconds)
    axes.set_xlabel(
        f"collectives take {quantity(found.links_seconds, 's')}, "
        f"{quantity(beside, 's')} of it overlapped",
        loc="left",
    )
    figure.legend(loc="outside lower left", ncols=4)


def _stack(figure: Any, pieces: Iterable[Piece], unit: str) -> Any:
    """Draw a stacked bar; the legend has names and values."""
    axes, begin = figure.subplots(), 0.0
    for piece in pieces:
        if piece.value:
            axes.barh(
                0,
                piece.value,
                left=begin,
                color=piece.colour,
                edgecolor="white",
                hatch="////" if piece.derived else None,
                label=f"{piece.name} {quantity(piece.value, unit)}",
            )
        begin += piece.value
    axes.set(yticks=[], ylim=(-0.4, 0.4))
    _tick(axes, unit)
    return axes


def _tick(axes: Any, unit: str) -> None:
    axes.spines["left"].set_visible(False)
    formatter = import_matplotlib("matplotlib.ticker").EngFormatter
    axes.xaxis.set_major_formatter(formatter(unit))
