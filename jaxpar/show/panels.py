"""What can be drawn of a plan: memory, traffic, the step's time, the pipeline."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.pipeline.schedules.table import Schedule, cost
from jaxpar.planner.plan import Plan
from jaxpar.planner.roofline import Estimate
from jaxpar.show import bars
from jaxpar.show.bars import (
    FONT,
    INK,
    LINE,
    MARGIN,
    POINTS_PER_INCH,
    TICKS,
    WIDTH,
    Bar,
    Piece,
    quantity,
)
from jaxpar.show.schedule import COLOURS, DIGIT_WIDTH, LETTERS, NAMES, Box, boxes
from jaxpar.show.schedule import title as name_of

BAR, TIER, ROW, STAGE = 0.46, 0.2, 0.2, 0.26
"""Inches: a stacked bar, a label above it, a plain bar, a stage's lane."""
LABEL, LABEL_FONT, NUMBER = 0.53, 8.0, 1.4
"""Traffic labels: a character's width in heights of its font; a value's inches."""
STAGE_LABEL, MOST_INCHES, MOST_NAMED = 0.7, 4.0, 16
SMALLEST_FONT = 5.0
MOST_ROWS, MOST_LETTERS = 10, 60
MOST_OUTLINES = 5000
"""An SVG draws up to this many boxes as outlines, more as one image."""
DERIVED = (
    "hatched: derived (closed forms, and the rest of the temporaries); solid, and "
    "the peak: the compiler's"
)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of the picture.

    Attributes:
      heading: what it shows.
      finding: the number to take away.
      inches: height of the axes.
      below: inches of ticks, legends and notes below them.
      paint: draws on the axes; None if there is nothing to draw.
      left: inches of the labels at the left.
      colour: of the finding.
    """

    heading: str
    finding: str
    inches: float
    below: float
    paint: Callable[[Any], None] | None
    left: float = MARGIN
    colour: str = INK


def panels(plan: Plan) -> dict[str, Panel]:
    """Name -> panel, for those that the plan has numbers for."""
    found = {"memory": _memory(plan), "traffic": _traffic(plan)}
    if plan.estimate is not None:
        found["time"] = _time(plan, plan.estimate)
    if plan.schedule is not None:
        found["pipeline"] = _pipeline(plan.schedule, plan.schedule_times)
    return found


def verdict(plan: Plan) -> str:
    """Say whether the plan fits, and by how much."""
    peak, whole = plan.memory.peak, plan.device_memory_bytes
    if whole is None:
        return f"peak {quantity(peak, 'B')}; the device's memory is unknown"
    if peak > whole:
        return (
            f"does not fit: {quantity(peak - whole, 'B')} over {quantity(whole, 'B')}"
        )
    return f"fits: {quantity(whole - peak, 'B')} of {quantity(whole, 'B')} are free"


def memory_pieces(plan: Plan) -> list[Piece]:
    """A device's memory by kind; the sum is state, batch and temporaries."""
    memory = plan.memory
    other = memory.state - memory.parameters - memory.optimizer
    blue, green, yellow = (COLOURS[k] for k in ("forward", "backward", "weight"))
    left = memory.activations
    return [
        Piece("parameters", memory.parameters, bars.DEEP),
        Piece("optimizer state", memory.optimizer, bars.PALE),
        Piece("other state", other, bars.MUTED),
        Piece("batch", memory.batch, bars.STONE),
        Piece("compute copies", memory.copies, blue, derived=True),
        Piece("gradients", memory.gradients, green, derived=True),
        Piece("activations and other temporaries", left, yellow, derived=True),
    ]


def time_pieces(found: Estimate) -> list[Piece]:
    """A step's time by kind; the sum is the step."""
    return [
        Piece("matmuls", found.products_seconds, bars.DEEP),
        Piece("other kernels", found.memory_seconds, bars.PALE),
        Piece("exposed communication", found.exposed_seconds, bars.LINKS),
        Piece("bubble", found.bubble_seconds, bars.IDLE),
    ]


def traffic_rows(plan: Plan) -> list[tuple[str, int, int]]:
    """(collective, bytes that a device sends, times), most bytes first."""
    sums: dict[str, tuple[int, int]] = {}
    for row in plan.program.collectives:
        over = f" over {' x '.join(row.axes)}" if row.axes else ""
        name = f"{row.kind}{over}, {row.dtype}"
        sent, times = sums.get(name, (0, 0))
        sums[name] = (sent + row.sent_bytes, times + row.count)
    rows = [(name, *both) for name, both in sums.items()]
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def _memory(plan: Plan) -> Panel:
    pieces, limit = memory_pieces(plan), plan.device_memory_bytes
    whole, peak = sum(piece.value for piece in pieces), plan.memory.peak
    is_over = plan.fits is False
    marks = [("peak", peak, INK)]
    if limit is not None:
        marks.append(("device memory", limit, bars.RED if is_over else INK))
    tier, top = TIER / BAR, 1 + len(marks) * TIER / BAR
    bar = Bar(
        pieces,
        "B",
        span=1.01 * max(whole, peak, limit or 0),
        marks=tuple(at for _, at, _ in marks),
    )

    def paint(axes: Any) -> None:
        bars.stack(axes, bar)
        axes.set_ylim(0, top)
        for number, (name, at, colour) in enumerate(marks, 1):
            text = f"{name} {quantity(at, 'B')}"
            bars.mark(axes, text, at, 1 + tier * number, colour)
        if is_over:
            over = {"color": bars.RED, "alpha": 0.09, "linewidth": 0, "zorder": 0}
            axes.axvspan(limit, bar.span, **over)
        apart = "; not all live at once" if whole > 1.01 * peak else ""
        bars.note(axes, DERIVED + apart, bar.key_rows)

    return Panel(
        heading="Memory of one device",
        finding=verdict(plan),
        inches=BAR * top,
        below=TICKS + LINE * (2 + bar.key_rows),
        paint=paint,
        colour={None: INK, True: bars.GREEN, False: bars.RED}[plan.fits],
    )


def _traffic(plan: Plan) -> Panel:
    rows = traffic_rows(plan)
    if len(rows) > MOST_ROWS:
        others = rows[MOST_ROWS - 1 :]
        summed = (sum(row[1] for row in others), sum(row[2] for row in others))
        rows = [*rows[: MOST_ROWS - 1], (f"{len(others)} others", *summed)]
    names = [_cut(name) for name, _, _ in rows]
    longest = max(map(len, names), default=0)
    left = MARGIN + LABEL * LABEL_FONT * (longest + 1) / POINTS_PER_INCH
    wide = WIDTH - MARGIN - left
    finding = quantity(sum(sent for _, sent, _ in rows), "B")
    if plan.links is not None:
        inside = quantity(plan.links.inside_host, "B")
        between = quantity(plan.links.between_hosts, "B")
        finding += f": {inside} inside its host, {between} between hosts"

    def paint(axes: Any) -> None:
        most = max(sent for _, sent, _ in rows)
        span = most * wide / (wide - NUMBER) or 1
        axes.set(xlim=(0, span), ylim=(len(rows) - 0.4, -0.6))
        places, lengths = range(len(rows)), [sent for _, sent, _ in rows]
        axes.barh(places, lengths, height=0.66, color=bars.LINKS)
        axes.set_yticks(places, names)
        for place, (_, sent, times) in zip(places, rows, strict=True):
            plural = "s" * (times != 1)
            axes.annotate(
                f"{quantity(sent, 'B')}, {times:,} time{plural}",
                (sent, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center_baseline",
                fontsize=FONT,
            )
        bars.ticks(axes, "B")

    return Panel(
        heading="What one device sends in a step",
        finding=finding if rows else "nothing",
        inches=ROW * len(rows),
        below=TICKS + LINE / 2 if rows else 0.0,
        paint=paint if rows else None,
        left=left,
    )


def _cut(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 3] + "..."


def _time(plan: Plan, found: Estimate) -> Panel:
    bar = Bar(time_pieces(found), "s", span=found.step_seconds)
    finding = f"{quantity(found.step_seconds, 's')}, MFU {found.mfu:.1%}"
    if plan.tokens_per_second is not None:
        finding += f", {plan.tokens_per_second:,.0f} tokens/s"
    beside = max(found.links_seconds - found.exposed_seconds, 0.0)
    text = (
        f"collectives take {quantity(found.links_seconds, 's')}, "
        f"{quantity(beside, 's')} of it overlapped"
    )

    def paint(axes: Any) -> None:
        bars.stack(axes, bar)
        axes.set_ylim(0, 1)
        bars.note(axes, text, bar.key_rows)

    return Panel(
        heading="Time of a step, estimated",
        finding=finding,
        inches=BAR,
        below=TICKS + LINE * (2 + bar.key_rows),
        paint=paint,
    )


def _pipeline(schedule: Schedule, times: Mapping[str, float]) -> Panel:
    found, whole = boxes(schedule, times), cost(schedule, **times)
    paler = "; later chunks are paler" if schedule.num_chunks > 1 else ""

    def paint(axes: Any) -> None:
        stages, points = schedule.num_stages, _points(found, whole.total)
        _lanes(axes, schedule, found, linewidth=min(0.6, points / 10))
        digits = len(str(schedule.num_microbatches - 1)) + 0.5
        _numbers(axes, found, min(FONT, points / (DIGIT_WIDTH * digits)))
        named = range(0, stages, math.ceil(stages / MOST_NAMED))
        axes.set_yticks(named, [f"stage {stage}" for stage in named])
        axes.set(xlim=(0, whole.total), ylim=(stages - 0.5, -0.5))
        bars.note(axes, f"time in forwards of one stage; blank: idle{paler}", 1)

    return Panel(
        heading=f"Pipeline, {name_of(schedule)}",
        finding=f"bubble {whole.bubble:.1%}",
        inches=min(STAGE * schedule.num_stages, MOST_INCHES),
        below=TICKS + 3 * LINE,
        paint=paint,
        left=STAGE_LABEL,
    )


def _points(found: list[Box], total: float) -> float:
    """Length of the shortest box on paper."""
    wide = POINTS_PER_INCH * (WIDTH - STAGE_LABEL - MARGIN)
    return wide * min(box.length for box in found) / total


def _lanes(
    axes: Any, schedule: Schedule, found: list[Box], *, linewidth: float
) -> None:
    """Draw the boxes; of interleaved stages, later chunks paler."""
    named = {}
    for work, stage in itertools.product(LETTERS, range(schedule.num_stages)):
        own = [box for box in found if (box.work, box.stage) == (work, stage)]
        if not own:
            continue
        own.sort(key=lambda box: box.chunk)  # The legend takes the first one's colour.
        shades = [1 - 0.6 * box.chunk / schedule.num_chunks for box in own]
        drawn = axes.broken_barh(
            [(box.begin, box.length) for box in own],
            (stage - 0.44, 0.88),
            facecolors=[(COLOURS[work], shade) for shade in shades],
            edgecolor="white",
            linewidth=linewidth,
            rasterized=len(found) > MOST_OUTLINES,
        )
        named.setdefault(NAMES[work], drawn)
    bars.key(axes, [(drawn, name) for name, drawn in named.items()])


def _numbers(axes: Any, found: list[Box], font: float) -> None:
    """Write the micro-batch numbers into the boxes, where they are legible."""
    for box in found if font >= SMALLEST_FONT else ():
        middle = box.begin + box.length / 2
        style = {"ha": "center", "va": "center_baseline", "fontsize": font}
        axes.text(middle, box.stage, str(box.microbatch), **style)
