"""How is a schedule shown: as text in a terminal, or drawn to scale?"""

import collections
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Column, Table

from jaxpar.pipeline.schedules.chart import LETTERS, chart, lanes, title
from jaxpar.pipeline.schedules.table import IDLE, Schedule, cost, kept
from jaxpar.show.plotting import new_figure, save

# Work -> colour and name in the drawing.
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
            for work, slots in lanes(schedule):
                m, chunk = map(int, slots[tick, stage])
                if m == IDLE:
                    continue
                length = times[work] / schedule.num_chunks
                found.append(Box(work, stage, m, chunk, now, length))
                now += length
            tick_end = max(tick_end, now)
        tick_begin = tick_end
    return found


def report(schedule: Schedule, times: Mapping[str, float], width: int) -> Group:
    """Write a schedule's chart, its cost and its memory.

    Args:
      schedule: a valid schedule.
      times: as for `boxes`.
      width: of the terminal, in characters.

    Returns:
      A rich renderable.
    """
    works = list(dict.fromkeys(work for work, _ in lanes(schedule)))
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
