"""Which schedules can be chosen by name?"""

from collections.abc import Callable

from jaxpar.pipeline.schedules.asynchronous import (
    Asynchronous,
    PipeDream2BW,
    PipeMare,
)
from jaxpar.pipeline.schedules.gpipe import make_gpipe
from jaxpar.pipeline.schedules.interleaved import (
    make_1f1b,
    make_in_groups,
    make_interleaved,
)
from jaxpar.pipeline.schedules.table import Schedule, check_schedule
from jaxpar.pipeline.schedules.zero_bubble import make_zero_bubble
from jaxpar.tree import near_match

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": make_gpipe,
    "1f1b": make_1f1b,
    "interleaved": make_interleaved,
    "zero_bubble": make_zero_bubble,
}
"""Name -> ``(num_stages, num_microbatches) -> Schedule``; "interleaved" also takes the
number of chunks."""

ASYNCHRONOUS: dict[str, type[PipeDream2BW | PipeMare]] = {
    "pipedream_2bw": PipeDream2BW,
    "pipemare": PipeMare,
}
"""Those whose gradients are of older parameters; no search chooses one."""

DEFAULT_CHUNKS = 2


def make_schedule(
    schedule: str | Schedule | Asynchronous, num_stages: int, num_microbatches: int
) -> Schedule:
    """Make a schedule by name, or check a given one.

    Args:
      schedule: a name of `SCHEDULES` or `ASYNCHRONOUS`, "interleaved:4" for another
        number of chunks a stage than 2, "pipemare:200" for 200 steps without delay at
        the beginning, an asynchronous schedule with settings of its own, or a table of
        the user's own.
      num_stages: P, at least 1.
      num_microbatches: M, at least 1.

    Returns:
      The schedule.

    Raises:
      ValueError: if the name is unknown, the schedule does not support these numbers,
        or a table is invalid or made for other numbers.

    Example:
      >>> make_schedule("1f1b", 4, 8).num_ticks
      14
    """
    numbers = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    for argument, number in numbers.items():
        if number < 1:
            raise ValueError(f"{argument}={number} must be at least 1.")
    if isinstance(schedule, Schedule):
        _check_table(schedule, num_stages, num_microbatches)
        return schedule
    if (late := asynchronous(schedule)) is not None:
        if num_stages == 1:  # Nothing is under way between steps.
            return make_1f1b(num_stages, num_microbatches)
        return late.table(num_stages, num_microbatches)
    assert isinstance(schedule, str), "no other kind is left"
    name, _, chunks = schedule.partition(":")
    if name not in SCHEDULES:
        names = [*SCHEDULES, *ASYNCHRONOUS]
        raise ValueError(
            f"schedule={schedule!r} must be one of "
            f"{', '.join(map(repr, names))}.{near_match(name, names)}"
        )
    if name != "interleaved":
        if chunks:
            raise ValueError(
                f"schedule={schedule!r}: only 'interleaved' has chunks; use "
                f"{name!r}, or 'interleaved:{chunks}'."
            )
        return SCHEDULES[name](num_stages, num_microbatches)
    if chunks and not (chunks.isdecimal() and int(chunks) > 0):
        raise ValueError(
            f"schedule={schedule!r}: {chunks!r} must be a number of chunks a stage, as "
            "in 'interleaved:4'."
        )
    num_chunks = int(chunks or DEFAULT_CHUNKS)
    return make_interleaved(num_stages, num_microbatches, num_chunks)


def _check_table(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    """Raise for a table that is not valid, or made for other numbers."""
    made_for = (schedule.num_stages, schedule.num_microbatches)
    if made_for != (num_stages, num_microbatches):
        raise ValueError(
            f"schedule={schedule.name!r} is made for {made_for[0]} stages and "
            f"{made_for[1]} micro-batches, but pipe={num_stages} and accumulate="
            f"{num_microbatches}; make it for these."
        )
    check_schedule(schedule)


def asynchronous(schedule: str | Schedule | Asynchronous) -> Asynchronous | None:
    """The asynchronous schedule that is meant; None for another.

    Raises:
      ValueError: if what follows its name is not a number of steps.
    """
    if not isinstance(schedule, str):
        return schedule if isinstance(schedule, Asynchronous) else None
    name, _, steps = schedule.partition(":")
    if name not in ASYNCHRONOUS:
        return None
    if steps and not steps.isdecimal():
        raise ValueError(
            f"schedule={schedule!r}: {steps!r} must be a number of steps without delay "
            f"at the beginning, as in '{name}:200'."
        )
    return ASYNCHRONOUS[name](synchronous_steps=int(steps or 0))


def chunks_of(schedule: str | Schedule, num_sections: int) -> int:
    """Chunks that a schedule gives each section on each stage.

    Args:
      schedule: as `make_schedule` takes it.
      num_sections: sections of the model.

    Returns:
      The number.

    Raises:
      ValueError: if a table's chunks can't be shared by the sections.
    """
    if isinstance(schedule, str):
        return make_schedule(schedule, 1, 1).num_chunks
    if schedule.num_chunks % num_sections:
        raise ValueError(
            f"schedule={schedule.name!r}: its num_chunks={schedule.num_chunks} must be "
            f"a multiple of the model's {num_sections} sections, each of which has as "
            "many chunks on every stage; or use '1f1b' or 'gpipe'."
        )
    return schedule.num_chunks // num_sections


def with_chunks(
    schedule: str | Schedule, num_stages: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    """Make a schedule by name for the chunks of several sections.

    Args:
      schedule: as `make_schedule` takes it.
      num_stages: P.
      num_microbatches: M.
      num_chunks: chunks a stage, of all sections.

    Returns:
      The schedule.

    Raises:
      ValueError: as `make_schedule`, and if the schedule can't have as many chunks.
    """
    made = make_schedule(schedule, num_stages, num_microbatches)
    if made.num_chunks == num_chunks:
        return made
    name = made.name
    if made.splits_backward or not isinstance(schedule, str):
        raise ValueError(
            f"schedule={name!r}: it has num_chunks={made.num_chunks}, but the model's "
            f"sections have {num_chunks} chunks on a stage; use '1f1b' or 'gpipe'."
        )
    if name == "gpipe":
        return make_gpipe(num_stages, num_microbatches, num_chunks)
    return make_in_groups(name, num_stages, num_microbatches, num_chunks)
