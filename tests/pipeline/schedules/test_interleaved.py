"""Do 1F1B and its interleaving take the fewest ticks, and keep what they promise?"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline.schedules.interleaved import (
    make_1f1b,
    make_in_groups,
    make_interleaved,
)
from jaxpar.pipeline.schedules.table import cost, kept
from tests.pipeline.schedules.ticks import busy_ticks

stages = st.integers(1, 8)
microbatches = st.integers(1, 32)
chunks = st.integers(1, 4)


@given(stages, microbatches)
def test_1f1b_takes_the_ticks_and_keeps_the_inputs_it_promises(P, M):
    schedule = make_1f1b(P, M)
    assert schedule.num_ticks == M + 2 * (P - 1)
    assert busy_ticks(schedule.forward) == list(range(M + P - 1))
    assert busy_ticks(schedule.backward) == list(range(P - 1, M + 2 * (P - 1)))
    most = [min(M, 2 * (P - stage) - 1) for stage in range(P)]
    assert kept(schedule).inputs.tolist() == most
    assert kept(schedule).products.tolist() == [0] * P
    assert cost(schedule).bubble == pytest.approx((P - 1) / (M + P - 1))


@given(stages, chunks, st.integers(1, 4))
def test_interleaved_divides_the_bubble_by_its_chunks(P, v, groups):
    M = groups * P
    schedule = make_interleaved(P, M, v)
    bubble = cost(schedule, forward=1.0, backward=2.0).bubble
    assert bubble == pytest.approx((P - 1) / (v * M + P - 1))
    assert schedule.num_ticks == v * M + v * P + P - 2
    inputs = kept(schedule).inputs
    assert inputs.max() <= 2 * v * P - 1
    if groups > 1:
        assert inputs[0] == inputs.max() == (v + 1) * P - 1


@given(st.integers(2, 8), st.data())
def test_interleaved_refuses_a_group_that_is_not_full(P, data):
    M = data.draw(microbatches.filter(lambda M: M % P))
    make_interleaved(P, M, 1)
    near = f"{M // P * P} or {M // P * P + P}" if M > P else f"{P}"
    message = (
        rf"accumulate={M}: schedule='interleaved' takes micro-batches in groups of "
        rf"pipe={P}; use a multiple, such as {near}, or schedule='1f1b', which takes"
    )
    with pytest.raises(ValueError, match=message):
        make_interleaved(P, M, 2)


def fewest_ticks(P, M, v=1) -> int:
    """By search: with a forward and a backward a stage and tick, in any order at all.

    A state holds, for each micro-batch, how many forwards and backwards it is behind.
    """
    last = v * P

    def forwards(state):
        at = [[m for m in range(M) if state[m][0] % P == s] for s in range(P)]
        able = [[m for m in own if state[m][0] < last] for own in at]
        for chosen in itertools.product(*([None, *own] for own in able)):
            yield [(f + (m in chosen), b) for m, (f, b) in enumerate(state)]

    def backwards(state):
        able = [[] for _ in range(P)]
        for m, (f, b) in enumerate(state):
            if f == last and b < last:
                able[(last - 1 - b) % P].append(m)
        for chosen in itertools.product(*([None, *own] for own in able)):
            yield [(f, b + (m in chosen)) for m, (f, b) in enumerate(state)]

    states, ticks = {((0, 0),) * M}, 0
    while ((last, last),) * M not in states:
        states = {
            tuple(sorted(after))
            for state in states
            for between in forwards(state)
            for after in backwards(between)
        }
        ticks += 1
    return ticks


@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize("M", [1, 2, 3])
def test_no_order_takes_fewer_ticks_than_1f1b(P, M):
    assert fewest_ticks(P, M) == make_1f1b(P, M).num_ticks == M + 2 * (P - 1)


@pytest.mark.parametrize(("P", "M", "v"), [(1, 3, 2), (2, 1, 2), (2, 2, 2), (3, 1, 2)])
def test_no_order_takes_fewer_ticks_than_interleaved(P, M, v):
    assert fewest_ticks(P, M, v) == make_in_groups("interleaved", P, M, v).num_ticks
