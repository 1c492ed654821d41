"""How is a schedule written: its work by stage and tick, one letter each."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from jaxpar.pipeline.schedules.table import IDLE, Schedule

LETTERS = {"forward": "F", "backward": "B", "weight": "W"}
STYLES = {
    "forward": "black on bright_blue",
    "backward": "black on bright_green",
    "weight": "black on bright_yellow",
}
"""Kind of work -> its letter, and its colour."""


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
    found = list(lanes(schedule))
    most = schedule.num_microbatches * (schedule.delay + 1) - 1
    last = _name(schedule, (most, schedule.num_chunks - 1))
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
            for work, slots in found:
                line = Text(f"{name:<{label - 2}}{LETTERS[work]} ")
                for slot in slots[list(ticks), stage]:
                    text = _name(schedule, slot)
                    line.append(
                        f"{text:>{cell}}", "dim" if text == "." else STYLES[work]
                    )
                lines.append(line)
                name = ""
    return Text("\n").join(lines)


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


def lanes(schedule: Schedule) -> Iterator[tuple[str, np.ndarray]]:
    """The work of a schedule, by kind, in the order in which a tick does it.

    Args:
      schedule: a valid schedule.

    Yields:
      ("forward", "backward" or "weight", its slots [ticks, P, 2]).
    """
    yield "forward", schedule.forward
    yield "backward", schedule.backward
    for slot in range(schedule.weight.shape[2]):
        if (schedule.weight[:, :, slot] != IDLE).any():
            yield "weight", schedule.weight[:, :, slot]


def _name(schedule: Schedule, slot: Sequence[int] | np.ndarray) -> str:
    m, chunk = map(int, slot)
    name = str(m) if schedule.num_chunks == 1 else f"{m}.{chunk}"
    return "." if m == IDLE else name
