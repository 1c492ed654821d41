"""Does a chart show what matters: all values, but no spike that flattens the rest?"""

import numpy as np
import pytest

from jaxpar.show.scale import Scale, choose_scale, nice_numbers


def test_scale_has_all_values_of_a_usual_curve():
    scale = choose_scale(np.linspace(5, 2, 100))
    assert scale.low < 2
    assert scale.high > 5
    assert not scale.is_log


def test_spike_is_left_above_and_placed_at_the_edge():
    values = np.append(np.linspace(5, 2, 1000), 1e6)
    scale = choose_scale(values)
    assert scale.high < 20
    assert scale.place(values)[-1] == 1.0
    assert scale.place(np.array([5.0]))[0] < 0.6


def test_rates_are_shown_from_zero():
    assert choose_scale(np.array([9.0, 10.0]), from_zero=True).low == 0
    assert choose_scale(np.array([-1.0, 10.0]), from_zero=True).low < -1


def test_values_over_decades_get_a_logarithmic_scale():
    scale = choose_scale(np.logspace(-4, 3, 50))
    assert scale.is_log
    assert scale.ticks() == pytest.approx([1e-4, 1e-2, 1e0, 1e2])
    decades = np.diff(scale.place(np.array([1.0, 10.0, 100.0])))
    np.testing.assert_allclose(decades, 1 / (7 + 2 * np.log10(1.2)))


@pytest.mark.parametrize(
    "values",
    [[0.0], [-3.0], [1e308, -1e308], [5e-324, 1.0], [1e300] * 3, [0.0, 1e-320]],
)
def test_any_finite_values_have_a_scale(values):
    for from_zero in (False, True):
        scale = choose_scale(np.array(values), from_zero=from_zero)
        assert scale.low < scale.high
        assert np.isfinite(scale.place(np.array(values))).all()
        assert len(scale.ticks()) <= 8


@pytest.mark.parametrize("high", [1e-9, 0.3, 1.0, 7.0, 60.0, 999_999.0])
def test_labels_are_few_round_and_within(high):
    found = nice_numbers(0.0, high)
    assert 3 <= len(found) <= 6
    assert min(found) >= 0
    assert max(found) <= high * (1 + 1e-9)
    assert {f"{each:.3e}"[0] for each in np.diff(found)} <= {"1", "2", "5"}


def test_labels_of_nothing_are_the_value_itself():
    assert nice_numbers(3.0, 3.0) == [3.0]
    assert Scale(0, 1).ticks()[0] == 0
