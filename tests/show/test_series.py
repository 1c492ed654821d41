"""Does a thinned curve keep its spikes, and a smoothed one its level?"""

import numpy as np

from jaxpar.show.series import Series, smooth, thin


def test_short_curve_is_kept_whole():
    np.testing.assert_array_equal(thin(np.arange(5.0), 10), np.arange(5))


def test_spikes_up_and_down_and_the_ends_survive_thinning():
    values = np.random.default_rng(0).normal(size=200_000)
    values[123_456], values[77_777] = 1e6, -1e6
    chosen = thin(values, 600)
    assert len(chosen) <= 600
    assert {0, 77_777, 123_456, 199_999} <= set(chosen.tolist())
    assert (np.diff(chosen) > 0).all()


def test_smoothed_curve_follows_a_line_and_averages_noise():
    steps = np.arange(1.0, 10_001.0)
    noise = np.random.default_rng(0).normal(size=len(steps))
    found = smooth(Series(steps, steps + noise))
    assert len(found) <= 300
    assert (found.steps[0], found.steps[-1]) == (1, 10_000)
    np.testing.assert_allclose(found.values[:-3], found.steps[:-3], atol=1)


def test_smoothing_leaves_out_what_is_not_finite_and_one_spike():
    values = np.full(5000, 2.0)
    values[100], values[2500] = np.nan, 1e12
    np.testing.assert_array_equal(smooth(Series(np.arange(5000.0), values)).values, 2.0)


def test_curve_without_numbers_stays_without():
    nothing = Series(np.arange(3.0), np.full(3, np.nan))
    assert np.isnan(smooth(nothing).values).all()
    assert len(smooth(Series(np.empty(0), np.empty(0)))) == 0
