"""How is a schedule shown: as text in a terminal, or drawn to scale?"""

import collections
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from jaxpar.pipeline.schedules.table import IDLE, Schedule, cost, kept
from jaxpar.show.plotting import new_figure, save

# Work -> letter and colour in the terminal, colour and name in the drawing.
LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
STYLES = {
    "forward": "black on bright_blue",
    "backward": "black on bright_green",
    "weight": "black on bright_yellow",
}
COLOURS = {"forward": "#56b4e9", "backward": "#2cb48c", "weight": "#f0b429"}
NAMES = {"forward": "forward", "backward": "backward", "weight": "gradients of weights"}

BOX_INCHES, MOST_INCHES = 0.3, 100.0
MOST_OUTLINES = 5000
"""An SVG draws up to this many boxes as outlines, more as one image."""
MOST_NAMED = 32
"""Stages with a label."""
SMALLEST_FONT = 4.0


class Box(NamedTuple):
    """One piece of work ("forward", "backward" or "weight"), to scale."""

    work: str
    stage: int
    microbatch: int
    chunk: int
    begin: float
    length: float


def boxes(schedule: Schedule, times: Mapping[str, float]) -> list[Box]:
    """Place a schedule's work in time: a tick lasts as long as its slowest stage.

    Args:
      schedule: a valid schedule.
      times: "forward", "backward" and "weight" -> time of a micro-batch through all
        chunks of one stage, as for `jaxpar.pipeline.schedules.table.cost`.

    Returns:
      Its work, tick by tick; inside a tick, a stage's work is contiguous.

    Example:
      >>> from jaxpar.pipeline.schedules.gpipe import make_gpipe
      >>> times = {"forward": 1.0, "backward": 2.0, "weight": 0.0}
      >>> [(box.work, box.begin, box.length) for box in boxes(make_gpipe(1, 1), times)]
      [('forward', 0.0, 1.0), ('backward', 1.0, 2.0)]
    """
    found, tick_begin = [], 0.0
    for tick in range(schedule.num_ticks):
        tick_end = tick_begin
        for stage in range(schedule.num_stages):
            now = tick_begin
            for work, slots in _lanes(schedule):
                m, chunk = map(int, slots[tick, stage])
                if m == IDLE:
                    continue
                length = times[work] / schedule.num_chunks
                found.append(Box(work, stage, m, chunk, now, length))
                now += length
            tick_end = max(tick_end, now)
        tick_begin = tick_end
    return found


def chart(schedule: Schedule, width: int) -> Text:
    """Write a schedule with one row per stage, time from left to right in ticks.

    A stage's row has a line for each kind of work. A chart wider than `width`
    characters continues in another band below. Its colours are not needed to read it.

    Example:
      >>> from jaxpar.pipeline.schedules.interleaved import make_1f1b
      >>> print(chart(make_1f1b(2, 3), width=80))
      tick       0 1 2 3 4
      stage 0 F  0 1 2 . .
              B  . . 0 1 2
      stage 1 F  . 0 1 2 .
              B  . 0 1 2 .
    """
    lanes = list(_lanes(schedule))
    last = _name(schedule, (schedule.num_microbatches - 1, schedule.num_chunks - 1))
    cell = 1 + max(len(last), len(str(schedule.num_ticks - 1)))
    label = len(f"stage {schedule.num_stages - 1} F ")
    ticks_a_band = max((width - label) // cell, 1)
    lines = []
    for first in range(0, schedule.num_ticks, ticks_a_band):
        ticks = range(first, min(first + ticks_a_band, schedule.num_ticks))
        head = "tick".ljust(label) + "".join(f"{tick:>{cell}}" for tick in ticks)
        lines += [Text()] * bool(first) + [Text(head, style="dim")]
        for stage in range(schedule.num_stages):
            name = f"stage {stage}"
            for work, slots in lanes:
                line = Text(f"{name:<{label - 2}}{LETTERS[work]} ")
                for slot in slots[list(ticks), stage]:
                    text = _name(schedule, slot)
                    line.append(
                        f"{text:>{cell}}", "dim" if text == "." else STYLES[work]
                    )
                lines.append(line)
                name = ""
    return Text("\n").join(lines)


def report(schedule: Schedule, times: Mapping[str, float], width: int) -> Group:
    """Write a schedule's chart, its cost and its memory.

    Args:
      schedule: a valid schedule.
      times: as for `boxes`.
      width: of the terminal, in characters.

    Returns:
      A rich renderable.
    """
    works = list(dict.fromkeys(work for work, _ in _lanes(schedule)))
    found = cost(schedule, **times)
    legend = ", ".join(f"{LETTERS[work]} {NAMES[work]}" for work in works)
    number = "micro-batch" if schedule.num_chunks == 1 else "micro-batch.chunk"
    taken = ", ".join(f"{NAMES[work]} {times[work]:g}" for work in works)
    most = kept(schedule)
    columns = {"inputs": most.inputs, "cotangents": most.cotangents}
    if schedule.splits_backward:
        columns["products"] = most.products
    heads = [Column(name, justify="right") for name in columns]
    table = Table("stage", *heads, box=None, pad_edge=False)
    for stage, counts in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(stage), *map(str, counts))
    return Group(
        title(schedule),
        chart(schedule, width),
        f"{legend}; a number is a {number}\n",
        f"ticks {found.ticks}, total time {found.total:g}, bubble {found.bubble:.1%}",
        f"time of a micro-batch on a stage: {taken}\n",
        "held at once, at most, in micro-batches:",
        table,
    )


def title(schedule: Schedule) -> str:
    """The schedule's name and numbers.

    Example:
      >>> from jaxpar.pipeline.schedules.interleaved import make_1f1b
      >>> title(make_1f1b(2, 3))
      '1f1b: 2 stages, 3 micro-batches'
    """
    chunks = f" of {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_stages} stages{chunks}, "
        f"{schedule.num_microbatches} micro-batches"
    )


def draw(
    schedule: Schedule, times: Mapping[str, float], file: str | os.PathLike[str]
) -> None:
    """Draw a schedule to scale, one lane per stage.

    Args:
      schedule: a valid schedule.
      times: as for `boxes`.
      file: the PNG to write.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      OSError: if `file` can't be written.
    """
    found = cost(schedule, **times)
    shortest = min(box.length for box in boxes(schedule, times))
    inches = min(max(BOX_INCHES * found.total / shortest, 6.0), MOST_INCHES)
    with new_figure(inches + 1.0, 1.2 + 0.35 * schedule.num_stages) as figure:
        draw_schedule(figure, schedule, times, inches)
        figure.suptitle(f"{title(schedule)}; bubble {found.bubble:.1%}")
        save(figure, file, "png")


def draw_schedule(
    figure: Any,
    schedule: Schedule,
    times: Mapping[str, float],
    inches: float,
    unit: str = "",
) -> None:
    """Draw the boxes on a figure; of interleaved stages, later chunks paler.

    Micro-batch numbers are written if the shortest box has room for them.

    Args:
      figure: the figure or subfigure.
      schedule: a valid schedule.
      times: as for `boxes`.
      inches: width of the axes, about.
      unit: of the times.
    """
    axes, found, stages = figure.subplots(), boxes(schedule, times), schedule.num_stages
    found.sort(key=lambda box: box.chunk)  # The legend takes the first box's colour.
    total = max(box.begin + box.length for box in found)
    points = 72 * inches / total * min(box.length for box in found)
    lanes, named = collections.defaultdict(list), {}
    for box in found:
        lanes[box.work, box.stage].append(box)
    for (work, stage), own in lanes.items():
        shades = [1 - 0.6 * box.chunk / schedule.num_chunks for box in own]
        drawn = axes.broken_barh(
            [(box.begin, box.length) for box in own],
            (stage - 0.44, 0.88),
            facecolors=[(COLOURS[work], shade) for shade in shades],
            edgecolor="white",
            linewidth=min(0.6, points / 10),
            rasterized=len(found) > MOST_OUTLINES,
        )
        named.setdefault(NAMES[work], drawn)
    font = min(7.5, points / len(str(schedule.num_microbatches)))
    for box in found if font >= SMALLEST_FONT else ():
        middle = box.begin + box.length / 2
        style = {"ha": "center", "va": "center_baseline", "fontsize": font}
        axes.text(middle, box.stage, str(box.microbatch), in_layout=False, **style)
    labelled = range(0, stages, math.ceil(stages / MOST_NAMED))
    axes.set_yticks(labelled, [f"stage {stage}" for stage in labelled])
    axes.set(xlim=(0, total), ylim=(stages - 0.5, -0.5))
    time = f"time in {unit}" if unit else "time"
    paler = "; later chunks are paler" if schedule.num_chunks > 1 else ""
    time += "; a tick lasts as long as its slowest stage; blank: idle"
    axes.set_xlabel(time + paler, loc="left")
    figure.legend(named.values(), named, loc="outside lower left", ncols=len(named))


def _lanes(schedule: Schedule) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (work, slots [ticks, P, 2]), in the order in which a tick does them."""
    yield "forward", schedule.forward
    yield "backward", schedule.backward
    for slot in range(schedule.weight.shape[2]):
        if (schedule.weight[:, :, slot] != IDLE).any():
            yield "weight", schedule.weight[:, :, slot]


def _name(schedule: Schedule, slot: Sequence[int] | np.ndarray) -> str:
    m, chunk = map(int, slot)
    name = str(m) if schedule.num_chunks == 1 else f"{m}.{chunk}"
    return "." if m == IDLE else name
