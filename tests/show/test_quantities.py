"""Are numbers written short, and never so that they mislead?"""

import math

import pytest

from jaxpar.show.quantities import duration, moment, number, tick


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"),
        (1e30, "1e+30"),
        (-12345.6, "-12,346"),
        (2.5e-7, "2.5e-07"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_number_is_written(value, written):
    assert number(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(1e6, "1M"), (25_000, "25k"), (1e18, "1e+18"), (-0.5, "-0.5")],
)
def test_label_of_an_axis_is_short(value, written):
    assert tick(value) == written


def test_durations_have_two_units():
    found = [duration(each) for each in (0.04, 59.6, 3_661, 86_400 * 3, math.inf)]
    assert found == ["0.0 s", "60 s", "1 h 1 min", "3 d", "inf"]


def test_time_that_no_calendar_has_is_written_as_it_is():
    assert moment(1e30) == "1e+30"
