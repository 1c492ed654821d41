"""Is the zero-bubble schedule 1F1B's order with at most half of its bubble?"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.pipeline.schedules.interleaved import make_1f1b
from jaxpar.pipeline.schedules.table import check_schedule, cost, kept
from jaxpar.pipeline.schedules.zero_bubble import make_zero_bubble

stages = st.integers(1, 8)
microbatches = st.integers(1, 32)


@given(stages, st.data())
def test_zero_bubble_leaves_at_most_half_of_1f1b_s_bubble(P, data):
    M = data.draw(st.integers(max(2 * (P - 1), 1), 32))
    split = cost(make_zero_bubble(P, M), forward=1.0, backward=1.0, weight=1.0)
    joint = cost(make_1f1b(P, M), forward=1.0, backward=2.0)
    assert split.ticks == joint.ticks
    assert split.bubble * split.total <= joint.bubble * joint.total / 2 + 1e-9


@given(stages, microbatches)
def test_zero_bubble_has_1f1b_s_order_and_its_first_stage_waits_with_nothing(P, M):
    schedule, base = make_zero_bubble(P, M), make_1f1b(P, M)
    assert np.array_equal(schedule.forward, base.forward)
    assert np.array_equal(schedule.backward, base.backward)
    assert np.array_equal(schedule.weight[:, 0, 0], base.backward[:, 0])
    assert np.all(np.diff(check_schedule(schedule).weight, axis=0) >= 0)
    products = kept(schedule).products
    assert all(products[s] <= 2 * s + 1 for s in range(P))
