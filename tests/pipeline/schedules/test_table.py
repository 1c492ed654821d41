"""Do the builders make what they promise, and does the proof refuse what is unsound?"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline.schedules.gpipe import make_gpipe
from jaxpar.pipeline.schedules.interleaved import (
    make_1f1b,
    make_in_groups,
    make_interleaved,
)
from jaxpar.pipeline.schedules.table import (
    IDLE,
    Schedule,
    check_schedule,
    cost,
    empty,
    kept,
    slots_of,
)
from jaxpar.pipeline.schedules.zero_bubble import make_zero_bubble

stages = st.integers(1, 8)
microbatches = st.integers(1, 32)
chunks = st.integers(1, 4)


@st.composite
def schedules(draw):
    P, M = draw(stages), draw(microbatches)
    name = draw(st.sampled_from(("gpipe", "1f1b", "zero_bubble", "interleaved")))
    if name == "interleaved":
        return make_in_groups(name, P, M, draw(chunks))
    if name == "gpipe":
        return make_gpipe(P, M, draw(chunks))
    makers = {
        "1f1b": make_1f1b,
        "zero_bubble": make_zero_bubble,
    }
    return makers[name](P, M)


@given(schedules())
def test_built_schedule_is_sound_and_its_times_are_the_tables(schedule):
    times = check_schedule(schedule)
    for g in range(schedule.num_stages * schedule.num_chunks):
        chunk, stage = divmod(g, schedule.num_stages)
        for m in range(schedule.num_microbatches):
            forward = schedule.forward[times.forward[m, g], stage]
            backward = schedule.backward[times.backward[m, g], stage]
            assert tuple(forward) == tuple(backward) == (m, chunk)
            if schedule.splits_backward:
                weight = schedule.weight[times.weight[m, g], stage]
                assert [m, chunk] in weight.tolist()
    if not schedule.splits_backward:
        assert times.weight is times.backward


def changed(schedule, slots, *moves) -> Schedule:
    """The schedule with entries of one table overwritten: (index, value)."""
    table = getattr(schedule, slots).copy()
    for index, value in moves:
        table[index] = value
    return dataclasses.replace(schedule, **{slots: table})


@pytest.mark.parametrize("slots", ["forward", "backward", "weight"])
def test_missing_work_is_named(slots):
    nothing = np.full_like(getattr(make_zero_bubble(2, 3), slots), IDLE)
    schedule = dataclasses.replace(make_zero_bubble(2, 3), **{slots: nothing})
    message = (
        rf"schedule='zero_bubble': micro-batch 0 has no {slots} on stage 0, chunk 0; "
        "each is done once"
    )
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule)


def test_missing_work_is_named_by_stage_and_chunk():
    schedule = make_interleaved(2, 2, 2)
    tick = check_schedule(schedule).forward[1, 3]
    schedule = changed(schedule, "forward", ((tick, 1), IDLE))
    message = r"micro-batch 1 has no forward on stage 1, chunk 1; each is done once"
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule)


@pytest.mark.parametrize(
    ("slots", "index", "tick", "stage"),
    [
        ("forward", (4, 0), 4, 0),
        ("backward", (4, 1), 4, 1),
        ("weight", (4, 0, 1), 4, 0),
    ],
)
def test_work_done_twice_is_named(slots, index, tick, stage):
    schedule = changed(make_zero_bubble(2, 3), slots, (index, (0, 0)))
    message = (
        rf"schedule='zero_bubble': micro-batch 0 has a second {slots} on stage "
        rf"{stage}, chunk 0, in tick {tick}; each is done once"
    )
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule)


@pytest.mark.parametrize("slots", ["forward", "backward"])
@pytest.mark.parametrize(("m", "chunk"), [(3, 0), (-2, 0), (0, 1), (0, -1)])
def test_numbers_out_of_range_are_named(slots, m, chunk):
    schedule = changed(make_1f1b(2, 3), slots, ((2, 0), (m, chunk)))
    message = (
        rf"schedule='1f1b': {slots} of tick 2, stage 0 names micro-batch {m}, chunk "
        rf"{chunk}; there are 3 and 1\."
    )
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule)


# A backward before its forward is, on some stage, also before its cotangent is there.
@pytest.mark.parametrize(
    ("slots", "moves", "message"),
    [
        (
            "forward",
            [((1, 1), IDLE), ((0, 1), (0, 0))],
            r"tick 0 has a forward of micro-batch 0 on stage 1, chunk 0, before its "
            r"input is available; move it to tick 1 or later\.",
        ),
        (
            "backward",
            [((2, 0), IDLE), ((1, 0), (0, 0))],
            r"tick 1 has a backward of micro-batch 0 on stage 0, chunk 0, before its "
            r"cotangent is available; move it to tick 2 or later\.",
        ),
        (
            "backward",
            [((1, 1), IDLE), ((0, 1), (0, 0))],
            r"tick 0 has a backward of micro-batch 0 on stage 1, chunk 0, before its "
            r"cotangent is available; move it to tick 1 or later\.",
        ),
        (
            "weight",
            [((2, 0, 0), IDLE), ((1, 0, 0), (0, 0))],
            r"tick 1 has a weight gradient of micro-batch 0 on stage 0, chunk 0, "
            r"before its backward; move it to tick 2 or later\.",
        ),
    ],
)
def test_work_done_too_early_is_named(slots, moves, message):
    schedule = changed(make_zero_bubble(2, 3), slots, *moves)
    with pytest.raises(ValueError, match="schedule='zero_bubble': " + message):
        check_schedule(schedule)


@pytest.mark.parametrize("slots", ["forward", "backward"])
@given(schedule=schedules(), data=st.data())
def test_work_moved_before_what_it_needs_is_refused(slots, schedule, data):
    M = schedule.num_microbatches
    final = schedule.num_stages * schedule.num_chunks - 1
    g = data.draw(st.integers(0, final - 1)) if final else 0
    if slots == "forward":
        g = final - g
    m = data.draw(st.integers(0, M - 1))
    times = check_schedule(schedule)
    needed = times.input_there if slots == "forward" else times.cotangent_there
    if final == 0 or needed[m, g] == 0:
        return
    chunk, stage = divmod(g, schedule.num_stages)
    tick = getattr(times, slots)[m, g]
    early = data.draw(st.integers(0, needed[m, g] - 1))
    # Where the earlier slot is taken, the table grows by a tick before it.
    wider = {
        name: np.insert(getattr(schedule, name), early, IDLE, axis=0)
        for name in ("forward", "backward", "weight")
    }
    wider[slots][tick + 1, stage] = IDLE
    wider[slots][early, stage] = m, chunk
    with pytest.raises(ValueError, match=rf"tick {early} has a {slots}"):
        check_schedule(dataclasses.replace(schedule, **wider))


def test_cost_of_a_small_case_is_the_one_by_hand():
    # Ticks of 1f1b: F; F and F B; B and F B; B.
    schedule = make_1f1b(2, 2)
    found = cost(schedule, forward=1.0, backward=2.0)
    assert (found.ticks, found.total) == (4, 1 + 3 + 3 + 2)
    assert found.bubble == pytest.approx(1 / 3)
    found = cost(schedule, forward=3.0, backward=0.5)
    assert found.total == 3 + 3.5 + 3.5 + 0.5
    assert found.bubble == pytest.approx(1 - 7 / 10.5)


def test_cost_counts_gradients_of_weights_and_pieces_of_stages():
    weight = empty(3, 1, 2)
    weight[1, 0, 0], weight[2, 0, 0], weight[2, 0, 1] = (0, 0), (1, 0), (0, 1)
    table = np.array([[[0, 0]], [[1, 0]], [[IDLE, IDLE]]])
    schedule = Schedule("by hand", 1, 2, 2, table, table, weight)
    found = cost(schedule, forward=2.0, backward=4.0, weight=6.0)
    assert (found.total, found.bubble) == ((2 + 4 + 2 + 4 + 6 + 12) / 2, 0.0)


@given(schedules())
def test_kept_counts_what_a_walk_through_the_ticks_holds(schedule):
    times, most = check_schedule(schedule), kept(schedule)
    spans = {
        "inputs": (times.input_there, times.backward),
        "cotangents": (times.cotangent_there, times.backward),
    }
    if schedule.splits_backward:
        spans["products"] = (times.backward, times.weight)
    ticks = np.arange(schedule.num_ticks)[:, None]
    for name, (begin, end) in spans.items():
        for stage in range(schedule.num_stages):
            own = np.s_[:, stage :: schedule.num_stages]
            first, last = begin[own].ravel(), end[own].ravel()
            held = ((first <= ticks) & (ticks <= last)).sum(axis=1)
            assert getattr(most, name)[stage] == held.max()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.data())
def test_places_are_shared_by_nothing_alive_at_once_and_are_few(P, v, M, data):
    size = M * v * P
    numbers = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    begin = np.array(data.draw(numbers)).reshape(M, v * P)
    end = begin + np.array(data.draw(numbers)).reshape(M, v * P)
    place = slots_of(begin, end, P)
    for stage in range(P):
        own = np.s_[:, stage::P]
        spans = list(zip(begin[own].flat, end[own].flat, place[own].flat, strict=True))
        for one, other in itertools.combinations(spans, 2):
            if one[2] == other[2]:
                assert one[1] < other[0] or other[1] < one[0]
        alive = [sum(b <= tick <= e for b, e, _ in spans) for tick in range(20)]
        assert sorted({p for _, _, p in spans}) == list(range(max(alive)))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("forward", lambda table: table[:, :1]),
        ("backward", lambda table: table[:-1]),
        ("weight", lambda table: table[..., 0]),
        ("forward", lambda table: table.astype(float)),
    ],
)
def test_table_of_another_shape_or_kind_is_refused(name, cut):
    schedule = make_1f1b(2, 3)
    schedule = dataclasses.replace(schedule, **{name: cut(getattr(schedule, name))})
    with pytest.raises(ValueError, match=rf"{name} has shape .* but must have \("):
        check_schedule(schedule)
