"""How is a schedule shown: as text in a terminal, or drawn to scale?"""

import dataclasses
import os
from collections.abc import Iterator, Mapping

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxpar.pipeline.schedules.table import IDLE, Schedule, cost, kept
from jaxpar.show.plotting import import_matplotlib

# Work -> letter and colour in the terminal, colour and name in the drawing.
LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
STYLES = {
    "forward": "black on bright_blue",
    "backward": "black on bright_green",
    "weight": "black on bright_yellow",
}
COLOURS = {"forward": "#56b4e9", "backward": "#2cb48c", "weight": "#f0b429"}
NAMES = {"forward": "forward", "backward": "backward", "weight": "gradients of weights"}

BOX_INCHES = 0.3
MOST_INCHES = 100.0
DOTS_PER_INCH = 150
SMALLEST_FONT = 3.0
POINTS_PER_INCH = 72.0
DIGIT_WIDTH = 0.65
"""Width of a digit, in heights of the font."""


@dataclasses.dataclass(frozen=True)
class Box:
    """One piece of work, to scale.

    Attributes:
      work: "forward", "backward" or "weight".
      stage: the stage that does it.
      microbatch: its micro-batch.
      chunk: its chunk of the stage.
      begin: start time, in the unit of the times given.
      length: duration.
    """

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

    A stage's row has a line for each kind of work. A chart wider than `width` continues
    in another band below.

    Args:
      schedule: a valid schedule.
      width: of the terminal, in characters.

    Returns:
      The chart; its colours are not needed to read it.

    Example:
      >>> from jaxpar.pipeline.schedules.interleaved import make_1f1b
      >>> print(chart(make_1f1b(2, 3), width=80))
      tick       0 1 2 3 4
      stage 0 F  0 1 2 . .
              B  . . 0 1 2
      stage 1 F  . 0 1 2 .
              B  . 0 1 2 .
    """
    label = len(f"stage {schedule.num_stages - 1} F ")
    lanes = list(_lanes(schedule))
    written = (_name(schedule, slot) for _, slots in lanes for slot in _used(slots))
    longest = max(map(len, (*written, str(schedule.num_ticks - 1))))
    cell = longest + 1
    ticks_a_band = max((width - label) // cell, 1)
    lines = []
    for first in range(0, schedule.num_ticks, ticks_a_band):
        ticks = range(first, min(first + ticks_a_band, schedule.num_ticks))
        if first:
            lines.append(Text())
        head = "tick".ljust(label) + "".join(f"{tick:>{cell}}" for tick in ticks)
        lines.append(Text(head, style="dim"))
        for stage in range(schedule.num_stages):
            for number, (work, slots) in enumerate(lanes):
                name = f"stage {stage}" if number == 0 else ""
                line = Text(f"{name:<{label - 2}}{LETTERS[work]} ")
                for slot in slots[list(ticks), stage]:
                    idle = slot[0] == IDLE
                    text = "." if idle else _name(schedule, slot)
                    line.append(f"{text:>{cell}}", "dim" if idle else STYLES[work])
                lines.append(line)
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
    most, table = kept(schedule), Table(box=None, pad_edge=False)
    columns = {"inputs": most.inputs, "cotangents": most.cotangents}
    if schedule.splits_backward:
        columns["products"] = most.products
    table.add_column("stage")
    for name in columns:
        table.add_column(name, justify="right")
    for stage, counts in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(stage), *map(str, counts))
    return Group(
        Text(title(schedule)),
        chart(schedule, width),
        Text(f"{legend}; a number is a {number}\n"),
        Text(
            f"ticks {found.ticks}, total time {found.total:g}, "
            f"bubble {100 * found.bubble:.1f}%"
        ),
        Text(f"time of a micro-batch on a stage: {taken}\n"),
        Text("held at once, at most, in micro-batches:"),
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
    figure_module = import_matplotlib()
    found = boxes(schedule, times)
    cost_found = cost(schedule, **times)
    shortest = min(box.length for box in found)
    inches = min(max(BOX_INCHES * cost_found.total / shortest, 6.0), MOST_INCHES)
    height = 1.5 + 0.4 * schedule.num_stages
    figure = figure_module.Figure(figsize=(inches + 1.5, height), layout="constrained")
    axes = figure.add_subplot()
    for work in LETTERS:
        # The legend takes the colour of the first.
        own = sorted((b for b in found if b.work == work), key=lambda b: b.chunk)
        axes.barh(
            [box.stage for box in own],
            [box.length for box in own],
            left=[box.begin for box in own],
            height=0.9,
            color=[_shade(COLOURS[work], box.chunk, schedule) for box in own],
            edgecolor="white",
            label=NAMES[work] if own else None,
        )
    digits = len(str(schedule.num_microbatches - 1))
    box_points = POINTS_PER_INCH * inches * shortest / cost_found.total
    font = min(9.0, box_points / (DIGIT_WIDTH * digits))
    for box in found if font >= SMALLEST_FONT else ():
        axes.text(
            box.begin + box.length / 2,
            box.stage,
            str(box.microbatch),
            ha="center",
            va="center",
            fontsize=font,
            in_layout=False,
        )
    paler = "; later chunks are paler" if schedule.num_chunks > 1 else ""
    stages = range(schedule.num_stages)
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
    axes.set(
        xlim=(0, cost_found.total),
        ylim=(schedule.num_stages - 0.5, -0.5),
        xlabel=f"time; a tick lasts as long as its slowest stage{paler}",
        title=f"{title(schedule)}; bubble {100 * cost_found.bubble:.1f}%",
    )
    figure.legend(loc="outside lower center", ncols=len(LETTERS), frameon=False)
    figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def _lanes(schedule: Schedule) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (work, slots [ticks, P, 2]), in the order in which a tick does them."""
    yield "forward", schedule.forward
    yield "backward", schedule.backward
    for slot in range(schedule.weight.shape[2]):
        if _used(schedule.weight[:, :, slot]).size:
            yield "weight", schedule.weight[:, :, slot]


def _used(slots: np.ndarray) -> np.ndarray:
    return slots[slots[..., 0] != IDLE]


def _name(schedule: Schedule, slot: np.ndarray) -> str:
    m, chunk = map(int, slot)
    return str(m) if schedule.num_chunks == 1 else f"{m}.{chunk}"


def _shade(colour: str, chunk: int, schedule: Schedule) -> tuple[float, ...]:
    """The colour; later chunks are paler."""
    pale = 0.6 * chunk / schedule.num_chunks
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(part + (1 - part) * pale for part in parts)
