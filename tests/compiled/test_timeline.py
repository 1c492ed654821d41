"""Is every moment of a device counted once, as a count of ticks says?"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.compiled.timeline import Span, account

TICKS = 24
TIMES = st.integers(-3, TICKS + 3)
INTERVALS = st.tuples(TIMES, TIMES).map(lambda ends: tuple(map(float, sorted(ends))))
SPANS = st.lists(
    st.builds(
        lambda interval, op, communicates: Span(
            *interval, f"{op}{communicates}", communicates
        ),
        INTERVALS,
        st.sampled_from("ab"),
        st.booleans(),
    ),
    max_size=12,
)


def covers(intervals):
    """[intervals, ticks]: whether an interval covers a tick of the window."""
    ticks = np.arange(TICKS)
    return np.array(
        [(start <= ticks) & (ticks < end) for start, end in intervals], bool
    ).reshape(-1, TICKS)


@settings(deadline=None, max_examples=60)
@given(SPANS, st.lists(INTERVALS, max_size=3), st.lists(INTERVALS, max_size=3))
def test_parts_are_those_of_a_count_of_ticks(spans, waiting, left_out):
    found = account(spans, (0.0, float(TICKS)), waiting=waiting, left_out=left_out)
    running = covers([(s.start, s.end) for s in spans])
    moves = np.array([s.communicates for s in spans], bool)
    computes, moving = running[~moves].any(0), running[moves].any(0)
    waits, outside = covers(waiting).any(0), covers(left_out).any(0)
    idle = ~computes & ~moving
    expected = {
        "compute": computes,
        "communication": moving & ~computes,
        "input": idle & waits & ~outside,
        "other": idle & ~waits & ~outside,
        "left_out": idle & outside,
        "hidden": computes & moving,
    }
    for name, ticks in expected.items():
        assert getattr(found, name) == pytest.approx(ticks.sum()), name
    assert found.total + found.left_out == pytest.approx(TICKS)
    shares = dict.fromkeys([s.op for s in spans], 0.0)
    for tick in range(TICKS):
        now = [s for s, runs in zip(spans, running[:, tick], strict=True) if runs]
        now = [s for s in now if not s.communicates] or now
        for span in now:
            shares[span.op] += 1 / len(now)
    assert found.by_op == pytest.approx(shares)


def test_nothing_that_ran_is_all_other():
    found = account([], (1.0, 3.0))
    assert (found.compute, found.other, found.total) == (0.0, 2.0, 2.0)
