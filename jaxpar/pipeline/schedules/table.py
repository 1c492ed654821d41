"""What is a pipeline schedule: a table of the work in each tick, and its validation.

In a tick every stage does at most one forward and one backward, each of one micro-batch
and one chunk of the stage's blocks, and, if the backward is split, some weight
gradients. What a stage sends arrives before the next tick. `check_schedule` validates
any table and returns the tick of each piece of work; `kept` counts the buffers that it
needs, and `cost` its time.
"""

import dataclasses

import numpy as np

IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """One training step's order of work over the stages of a pipeline.

    Chunk c of stage s is the virtual stage c P + s: activations visit the virtual
    stages in order, and cotangents in reverse.

    Attributes:
      name: for people.
      num_stages: P, the devices on the pipe axis.
      num_microbatches: M.
      num_chunks: v, chunks of blocks on each stage.
      forward: integers [ticks, P, 2]: micro-batch and chunk; `IDLE` twice for none.
      backward: likewise; after the forward of the same tick. It includes the weight
        gradients, unless there are `weight` slots.
      weight: integers [ticks, P, w, 2]: weight gradients, after the backward of the
        same tick; w is 0 if the backward is not split.
      delay: 0 if the table is all of a step. Otherwise it is one step of many alike,
        and names micro-batches of this batch and of as many before, D: number b M + m
        is micro-batch m of batch b, of which the oldest, 0, ends in this step.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    delay: int = 0

    @property
    def num_ticks(self) -> int:
        """Rows of the table."""
        return len(self.forward)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have their own slots."""
        return self.weight.shape[2] > 0


@dataclasses.dataclass(frozen=True)
class Times:
    """The tick of each piece of work, [M, v P]: by micro-batch and virtual stage.

    Attributes:
      forward: ticks of the forwards.
      backward: ticks of the backwards.
      weight: ticks of the weight gradients; same as `backward` if it is not split.
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray

    @property
    def input_there(self) -> np.ndarray:
        """First tick in which a virtual stage's input is available.

        The first virtual stage's input is computed in the tick that uses it.
        """
        return np.concatenate([self.forward[:, :1], self.forward[:, :-1] + 1], axis=1)

    @property
    def cotangent_there(self) -> np.ndarray:
        """First tick in which a virtual stage's cotangent is available.

        The last virtual stage's comes from the loss, in the tick of its forward.
        """
        return np.concatenate([self.backward[:, 1:] + 1, self.forward[:, -1:]], axis=1)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The most values that each stage holds at once, in micro-batches.

    Attributes:
      inputs: [P]: inputs of chunks, from their arrival to their backward.
      cotangents: [P]: cotangents, from their arrival to their backward.
      products: [P]: backwards whose weight gradients are not computed yet.
    """

    inputs: np.ndarray
    cotangents: np.ndarray
    products: np.ndarray


@dataclasses.dataclass(frozen=True)
class Cost:
    """How long a schedule takes when every tick lasts as long as its slowest stage.

    Attributes:
      total: the total time, in the unit of the times given.
      bubble: fraction of the total in which the busiest stage is idle.
      ticks: number of ticks.
    """

    total: float
    bubble: float
    ticks: int


def check_schedule(schedule: Schedule) -> Times:
    """Validate a schedule.

    Args:
      schedule: a table, by one of the builders or the user's own. Of one with a delay
        that of some steps is validated.

    Returns:
      The tick of each piece of work.

    Raises:
      ValueError: if a micro-batch is missing on a stage, occurs twice, or is used
        before it is available.
    """
    _check_shapes(schedule)
    if schedule.delay:
        schedule = unrolled(schedule, 2 * schedule.delay + 2)
    forward = _ticks(schedule, "forward", schedule.forward[:, :, None])
    backward = _ticks(schedule, "backward", schedule.backward[:, :, None])
    weight = backward
    if schedule.splits_backward:
        weight = _ticks(schedule, "weight", schedule.weight)
    times = Times(forward, backward, weight)
    wanted = (
        ("a forward", forward, "its input is available", times.input_there),
        ("a backward", backward, "its cotangent is available", times.cotangent_there),
        ("a weight gradient", weight, "its backward", backward),
    )
    for what, tick, needs, earliest in wanted:
        early = np.argwhere(tick < earliest)
        if len(early):
            m, g = early[0]
            chunk, stage = divmod(int(g), schedule.num_stages)
            raise ValueError(
                f"schedule={schedule.name!r}: tick {tick[m, g]} has {what} of "
                f"micro-batch {m} on stage {stage}, chunk {chunk}, before {needs}; "
                f"move it to tick {earliest[m, g]} or later."
            )
    return times


def unrolled(schedule: Schedule, num_steps: int) -> Schedule:
    """What a schedule with a delay does in some steps, from the first to the last.

    Args:
      schedule: a step of many alike.
      num_steps: batches.

    Returns:
      A schedule of all their micro-batches, also of the ticks in which the pipeline
      fills and drains.
    """
    M = schedule.num_microbatches
    starts = M * (np.arange(num_steps + schedule.delay) - schedule.delay)

    def repeated(table: np.ndarray) -> np.ndarray:
        numbers = np.concatenate([table[..., 0] + first for first in starts])
        chunks = np.concatenate([table[..., 1]] * len(starts))
        there = (numbers >= 0) & (numbers < num_steps * M) & (chunks != IDLE)
        return np.where(there[..., None], np.stack([numbers, chunks], -1), IDLE)

    tables = [repeated(getattr(schedule, name)) for name in _TABLES]
    busy = np.flatnonzero(
        (tables[0] != IDLE).any((1, 2)) | (tables[1] != IDLE).any((1, 2))
    )
    tables = [table[busy[0] : busy[-1] + 1] for table in tables]
    numbers = schedule.num_stages, num_steps * M, schedule.num_chunks
    forward, backward, weight = tables
    return Schedule(schedule.name, *numbers, forward, backward, weight)


_TABLES = ("forward", "backward", "weight")


def _check_shapes(schedule: Schedule) -> None:
    ticks, P = schedule.num_ticks, schedule.num_stages
    wanted: dict[str, tuple] = {
        "forward": (ticks, P, 2),
        "backward": (ticks, P, 2),
        "weight": (ticks, P, "w", 2),
    }
    for name, shape in wanted.items():
        table = getattr(schedule, name)
        fits = table.ndim == len(shape) and all(
            want in (size, "w") for size, want in zip(table.shape, shape, strict=True)
        )
        if not fits or not np.issubdtype(table.dtype, np.integer):
            raise ValueError(
                f"schedule={schedule.name!r}: {name} has shape {table.shape} of "
                f"{table.dtype}, but must have {shape}, integers: ticks, stages, "
                + ("slots, " if name == "weight" else "")
                + "and (micro-batch, chunk)."
            )


def _ticks(schedule: Schedule, what: str, slots: np.ndarray) -> np.ndarray:
    """[M, v P]: the tick of each piece of work, from [ticks, P, slots a tick, 2]."""
    P, M, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    found = np.full((M, v * P), IDLE)
    for tick, stage, slot in np.argwhere(slots[..., 0] != IDLE):
        m, chunk = map(int, slots[tick, stage, slot])
        if not (0 <= m < M and 0 <= chunk < v):
            raise ValueError(
                f"schedule={schedule.name!r}: {what} of tick {tick}, stage {stage} "
                f"names micro-batch {m}, chunk {chunk}; there are {M} and {v}."
            )
        if found[m, chunk * P + stage] != IDLE:
            raise ValueError(
                f"schedule={schedule.name!r}: micro-batch {m} has a second {what} on "
                f"stage {stage}, chunk {chunk}, in tick {tick}; each is done once."
            )
        found[m, chunk * P + stage] = tick
    missing = np.argwhere(found == IDLE)
    if len(missing):
        m, g = map(int, missing[0])
        raise ValueError(
            f"schedule={schedule.name!r}: micro-batch {m} has no {what} on stage "
            f"{g % P}, chunk {g // P}; each is done once."
        )
    return found


def kept(schedule: Schedule) -> Kept:
    """Count the most values that each stage holds at once.

    Args:
      schedule: a valid schedule.

    Returns:
      The peaks by stage.
    """
    if schedule.delay:
        schedule = unrolled(schedule, 2 * schedule.delay + 2)
    times = check_schedule(schedule)

    def peaks(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        alive = np.zeros((schedule.num_ticks, schedule.num_stages), int)
        for (_, g), first in np.ndenumerate(begin):
            alive[first : end[_, g] + 1, g % schedule.num_stages] += 1
        return alive.max(axis=0)

    products = np.zeros(schedule.num_stages, int)
    if schedule.splits_backward:
        products = peaks(times.backward, times.weight)
    return Kept(
        inputs=peaks(times.input_there, times.backward),
        cotangents=peaks(times.cotangent_there, times.backward),
        products=products,
    )


def cost(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 0.0,
) -> Cost:
    """Time a schedule: a tick lasts as long as its slowest stage.

    Args:
      schedule: a valid schedule.
      forward: time of a micro-batch's forward through all chunks of one stage.
      backward: time of its backward; without the weight gradients if they have their
        own slots.
      weight: time of the weight gradients, if they have.

    Returns:
      The time of one step and its bubble.
    """
    busy = np.zeros((schedule.num_ticks, schedule.num_stages))
    busy += forward * (schedule.forward[..., 0] != IDLE)
    busy += backward * (schedule.backward[..., 0] != IDLE)
    busy += weight * (schedule.weight[..., 0] != IDLE).sum(axis=-1)
    busy /= schedule.num_chunks
    total = float(busy.max(axis=1).sum())
    return Cost(total, 1.0 - float(busy.sum(axis=0).max()) / total, schedule.num_ticks)


def slots_of(begin: np.ndarray, end: np.ndarray, num_stages: int) -> np.ndarray:
    """Assign buffer places, with the fewest places per stage.

    Args:
      begin: [M, v P]: the first tick in which a value is held.
      end: [M, v P]: the last tick.
      num_stages: P.

    Returns:
      [M, v P]: its place, from 0; values held at once on a stage have different places.
    """
    place = np.full(begin.shape, IDLE)
    for stage in range(num_stages):
        things = [(m, g) for m, g in np.ndindex(begin.shape) if g % num_stages == stage]
        free_from: list[int] = []
        for thing in sorted(things, key=lambda thing: (begin[thing], thing)):
            free = (i for i, tick in enumerate(free_from) if tick <= begin[thing])
            index = next(free, len(free_from))
            if index == len(free_from):
                free_from.append(0)
            free_from[index] = int(end[thing]) + 1
            place[thing] = index
    return place


def empty(num_ticks: int, *shape: int) -> np.ndarray:
    """An empty table, [num_ticks, *shape, 2]."""
    return np.full((num_ticks, *shape, 2), IDLE)
