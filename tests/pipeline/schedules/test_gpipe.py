"""Is GPipe all forwards, then all backwards?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline.schedules.gpipe import make_gpipe
from jaxpar.pipeline.schedules.table import check_schedule, cost, empty, kept
from tests.pipeline.schedules.ticks import busy_ticks

stages = st.integers(1, 8)
microbatches = st.integers(1, 32)
chunks = st.integers(1, 4)


@given(stages, microbatches)
def test_gpipe_is_all_forwards_then_all_backwards(P, M):
    schedule = make_gpipe(P, M)
    half = M + P - 1
    assert busy_ticks(schedule.forward) == list(range(half))
    assert busy_ticks(schedule.backward) == list(range(half, 2 * half))
    assert kept(schedule).inputs.tolist() == [M] * P
    assert cost(schedule).bubble == pytest.approx((P - 1) / half)


@given(stages, microbatches)
def test_gpipe_of_one_chunk_runs_micro_batch_m_on_stage_s_in_tick_m_plus_s(P, M):
    """And its backwards likewise, from the last stage to the first."""
    half = M + P - 1
    forward, backward = empty(2 * half, P), empty(2 * half, P)
    for m in range(M):
        for s in range(P):
            forward[m + s, s] = m, 0
            backward[half + m + P - 1 - s, s] = m, 0
    schedule = make_gpipe(P, M)
    assert schedule.num_chunks == 1
    assert np.array_equal(schedule.forward, forward)
    assert np.array_equal(schedule.backward, backward)


@given(stages, microbatches, chunks)
def test_gpipe_of_several_chunks_is_sound_and_keeps_all_micro_batches(P, M, v):
    schedule = make_gpipe(P, M, v)
    assert (schedule.name, schedule.num_chunks) == ("gpipe", v)
    assert not schedule.splits_backward
    times = check_schedule(schedule)
    assert times.forward.max() < times.backward.min()
    # From a chunk's input to its backward; the first chunk has every micro-batch's.
    assert kept(schedule).inputs.tolist() == [M * v] * P


@given(stages, chunks, st.integers(1, 4))
def test_gpipe_of_full_groups_divides_the_bubble_by_its_chunks(P, v, groups):
    M = groups * P
    schedule = make_gpipe(P, M, v)
    assert schedule.num_ticks == 2 * (v * M + P - 1)
    assert cost(schedule).bubble == pytest.approx((P - 1) / (v * M + P - 1))
