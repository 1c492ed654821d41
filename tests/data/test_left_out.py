import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.data.left_out import LeftOut

ROWS = 60
INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda x: (x[0], sum(x))),
    max_size=6,
)


@given(intervals=INTERVALS)
def test_rows_are_those_outside_the_intervals(intervals):
    left_out = LeftOut(intervals)
    kept = [
        row
        for row in range(ROWS)
        if not any(start <= row < stop for start, stop in intervals)
    ]
    assert [left_out.row(index) for index in range(len(kept))] == kept
    for row in range(ROWS + 1):
        assert left_out.num_kept(row) == sum(each < row for each in kept)


@pytest.mark.parametrize("interval", [(-1, 2), (3, 2)])
def test_interval_that_is_none_raises(interval):
    with pytest.raises(ValueError, match=rf"\({interval[0]}, {interval[1]}\) must be"):
        LeftOut([interval])
