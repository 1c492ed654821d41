"""Does a stage that follows its rows read what it should? By a simulation in Python.

Buffers are lists of names: ("input", m, g) is what virtual stage g reads of micro-batch
m, ("cotangent", m, g) is of what it gives, ("kept", m, g) is what its forward keeps for
its backward, ("product", m, g) what its backward leaves for its gradients of weights.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jaxpar.pipeline.schedules.gpipe import make_gpipe
from jaxpar.pipeline.schedules.interleaved import (
    make_1f1b,
    make_in_groups,
    make_interleaved,
)
from jaxpar.pipeline.schedules.table import IDLE, Schedule, kept
from jaxpar.pipeline.schedules.zero_bubble import make_zero_bubble
from jaxpar.pipeline.tick_table import TickRows, TickTable, make_tick_table

NUM_STAGES = range(1, 6)
MICROBATCHES = (1, 2, 3, 5, 8, 12)


def make_split(P: int, M: int, v: int) -> Schedule:
    """Interleaved, with the gradients of weights of each backward three ticks later."""
    base, late = make_interleaved(P, M, v), 3
    weight = np.pad(base.backward, ((late, 0), (0, 0), (0, 0)), constant_values=IDLE)
    behind = ((0, late), (0, 0), (0, 0))
    return dataclasses.replace(
        base,
        name="split",
        forward=np.pad(base.forward, behind, constant_values=IDLE),
        backward=np.pad(base.backward, behind, constant_values=IDLE),
        weight=weight[:, :, None],
    )


GRID = {
    **{make.__name__: [make(P, M) for P in NUM_STAGES for M in MICROBATCHES]
       for make in (make_gpipe, make_1f1b, make_zero_bubble)},
    "interleaved": [make_interleaved(P, groups * P, v)
                    for P in NUM_STAGES for groups in (1, 2, 3) for v in (1, 2, 3)],
    "split": [make_split(P, 2 * P, v) for P in NUM_STAGES for v in (1, 2, 3)],
    "in groups": [make_in_groups("any", P, M, v)
                  for P in (2, 3, 4) for M in MICROBATCHES for v in (2, 4)],
}  # fmt: skip
"""Builder -> its schedules."""


class Simulation:
    """The buffers of all stages, and what has been done."""

    def __init__(
        self, schedule: Schedule, table: TickTable, *, training: bool, keeps: bool
    ):
        self.P = schedule.num_stages
        self.virtual = schedule.num_stages * schedule.num_chunks
        self.training, self.keeps = training, keeps
        self.inputs = self.buffer(table.num_inputs)
        self.kept = self.buffer(table.num_kept)
        self.cotangents = self.buffer(table.num_cotangents)
        self.products = self.buffer(table.num_products)
        self.done = []

    def buffer(self, places: int) -> list[list]:
        return [[None] * places for _ in range(self.P)]

    def tick(self, row: TickRows):
        out = [self.forward(row, stage) for stage in range(self.P)]
        if row.head != IDLE:
            assert out[-1] == ("input", row.head, self.virtual)
            self.done.append(("head", row.head))
            if self.training:
                leaves = ("cotangent", row.head, self.virtual - 1)
                self.cotangents[-1][row.head_place] = leaves
        sent_back = [self.backward(row, stage) for stage in range(self.P)]
        if row.embed_backward != IDLE:
            assert sent_back[0] == ("cotangent", row.embed_backward, -1)
            self.done.append(("embed_backward", row.embed_backward))
        for stage in range(self.P):
            before, behind = (stage - 1) % self.P, (stage + 1) % self.P
            arrive(self.inputs[stage], row.input_arrives[stage], out[before])
            place = row.cotangent_arrives[stage]
            arrive(self.cotangents[stage], place, sent_back[behind])

    def forward(self, row: TickRows, stage: int):
        m, chunk = int(row.forward[stage]), int(row.forward_chunk[stage])
        place, kept = row.forward_place[stage], row.forward_kept[stage]
        if m == IDLE:
            assert chunk == place == kept == IDLE
            return None
        g = chunk * self.P + stage
        if g == 0:
            assert row.embed == m
            self.inputs[0][place] = ("input", row.embed, 0)
        assert self.inputs[stage][place] == ("input", m, g)
        if self.training:
            self.kept[stage][kept] = ("kept", m, g)
        self.done.append(("forward", m, g))
        return ("input", m, g + 1)

    def backward(self, row: TickRows, stage: int):
        m, chunk = int(row.backward[stage]), int(row.backward_chunk[stage])
        place, kept = row.backward_place[stage], row.backward_kept[stage]
        waits, leaves = row.cotangent_place[stage], row.products_place[stage]
        if m == IDLE:
            assert chunk == place == kept == waits == leaves == IDLE
            self.weights(row, stage)
            return None
        g = chunk * self.P + stage
        if not self.keeps:
            assert self.inputs[stage][place] == ("input", m, g)
        assert self.kept[stage][kept] == ("kept", m, g)
        assert self.cotangents[stage][waits] == ("cotangent", m, g)
        self.products[stage][leaves] = ("product", m, g)
        self.done.append(("backward", m, g))
        self.weights(row, stage)
        return ("cotangent", m, g - 1)

    def weights(self, row: TickRows, stage: int):
        slots = (row.weight, row.weight_chunk, row.weight_place)
        for m, chunk, place in zip(*(x[stage] for x in slots), strict=True):
            if m == IDLE:
                assert chunk == place == IDLE
                continue
            g = chunk * self.P + stage
            assert self.products[stage][place] == ("product", m, g)
            self.done.append(("weight", m, g))


def arrive(buffer, place, value):
    if place != IDLE:
        assert value is not None
        buffer[place] = value


def row_of(rows: TickRows, tick: int) -> TickRows:
    fields = dataclasses.fields(TickRows)
    return TickRows(**{f.name: getattr(rows, f.name)[tick] for f in fields})


def expected(schedule: Schedule, *, training: bool) -> list:
    work = ["forward"]
    if training:
        work += ["backward"] + ["weight"] * schedule.splits_backward
    virtual = range(schedule.num_stages * schedule.num_chunks)
    ends = ("head", "embed_backward") if training else ("head",)
    microbatches = range(schedule.num_microbatches)
    return sorted(
        [
            *((what, m, g) for what in work for m in microbatches for g in virtual),
            *((what, m) for what in ends for m in microbatches),
        ]
    )


def each(schedules: list[Schedule]) -> Iterator[Schedule]:
    """The schedules; captured output names the one that a failure is of."""
    for schedule in schedules:
        P, M, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
        print(f"{schedule.name}: {P} stages, {M} micro-batches, {v} chunks")
        yield schedule


MODES = {
    "backwards run again": {"training": True, "keeps": False},
    "forwards keep": {"training": True, "keeps": True},
    "forwards alone": {"training": False, "keeps": False},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("schedules", GRID.values(), ids=GRID)
def test_stages_that_follow_the_rows_read_what_they_should(schedules, mode):
    for schedule in each(schedules):
        table = make_tick_table(schedule, **mode)
        simulation = Simulation(schedule, table, **mode)
        for tick in range(len(table.rows.embed)):
            simulation.tick(row_of(table.rows, tick))
        right = expected(schedule, training=mode["training"])
        assert sorted(simulation.done) == right


@pytest.mark.parametrize("schedules", GRID.values(), ids=GRID)
def test_rows_do_in_each_tick_what_the_table_says(schedules):
    for schedule in each(schedules):
        rows = make_tick_table(schedule, training=True).rows
        for name in ("forward", "backward", "weight"):
            numbers = (getattr(rows, name), getattr(rows, f"{name}_chunk"))
            assert np.array_equal(np.stack(numbers, axis=-1), getattr(schedule, name))
        last = np.flatnonzero((schedule.forward[..., 0] != IDLE).any(axis=1))[-1]
        forwards = make_tick_table(schedule, training=False).rows
        assert np.array_equal(forwards.forward, schedule.forward[: last + 1, :, 0])
        assert np.all(forwards.backward == IDLE)
        assert np.all(forwards.weight == IDLE)
        for field in dataclasses.fields(TickRows):
            assert getattr(rows, field.name).dtype == np.int32
            assert len(getattr(forwards, field.name)) == last + 1


@pytest.mark.parametrize("schedules", GRID.values(), ids=GRID)
def test_buffers_have_as_many_places_as_are_held(schedules):
    for schedule in each(schedules):
        table, most = make_tick_table(schedule, training=True), kept(schedule)
        assert table.num_inputs == most.inputs.max()
        assert table.num_cotangents == most.cotangents.max()
        assert table.num_products == max(most.products.max(), 1)
        # Between a forward and its backward, by a walk through the table.
        held, peak = [0] * schedule.num_stages, 0
        for forwards, backwards in zip(
            schedule.forward, schedule.backward, strict=True
        ):
            for stage in range(schedule.num_stages):
                held[stage] += int(forwards[stage, 0] != IDLE)
                peak = max(peak, held[stage])
                held[stage] -= int(backwards[stage, 0] != IDLE)
        assert table.num_kept == peak


def test_input_that_no_backward_needs_is_freed_in_the_tick_that_reads_it():
    def places(**mode):
        return make_tick_table(make_gpipe(4, 8), **mode).num_inputs

    assert places(training=True) == 8
    assert places(training=True, keeps=True) == places(training=False) == 1
