"""Is GPipe all forwards, then all backwards?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline.schedules.gpipe import make_gpipe
from jaxpar.pipeline.schedules.table import cost, kept
from tests.pipeline.schedules.ticks import busy_ticks

stages = st.integers(1, 8)
microbatches = st.integers(1, 32)


@given(stages, microbatches)
def test_gpipe_is_all_forwards_then_all_backwards(P, M):
    schedule = make_gpipe(P, M)
    half = M + P - 1
    assert busy_ticks(schedule.forward) == list(range(half))
    assert busy_ticks(schedule.backward) == list(range(half, 2 * half))
    assert kept(schedule).inputs.tolist() == [M] * P
    assert cost(schedule).bubble == pytest.approx((P - 1) / half)
