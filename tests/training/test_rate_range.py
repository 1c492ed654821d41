"""Is the range of a loss whose fall and rise are known the one that is found?"""

import numpy as np
import pytest

from jaxpar.training.rate_range import find_rate_range, smoothed

RATES = np.linspace(0.01, 2.0, 200)


def made(noise: float = 0.0) -> np.ndarray:
    """Flat to a rate of 0.5, then from 4 to 1 at 1.5, then to 7 at 2."""
    losses = np.interp(RATES, [0.5, 1.5, 2.0], [4.0, 1.0, 7.0])
    return losses + noise * np.random.default_rng(0).normal(size=len(RATES))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_range_is_from_a_tenth_of_the_fall_to_the_least_loss(noise: float) -> None:
    found = find_rate_range(RATES, made(noise))
    # The window's 11 steps are 0.1 of the rate: it lifts the least loss, and its place
    # moves to the flatter side by less than half of that.
    assert found.low == pytest.approx(0.6, abs=0.03)
    assert found.high == pytest.approx(1.47, abs=0.04)
    assert found.has_risen


def test_share_is_of_the_fall() -> None:
    found = find_rate_range(RATES, made(), share=0.5)
    assert found.low == pytest.approx(1.0, abs=0.05)


def test_range_ends_at_the_first_rise_though_the_loss_falls_again() -> None:
    losses = np.interp(RATES, [0.1, 0.6, 0.9, 1.2, 2.0], [4.0, 2.0, 3.0, 1.0, 1.0])
    found = find_rate_range(RATES, losses)
    assert found.high == pytest.approx(0.6, abs=0.03)


def test_noise_before_the_fall_is_no_rise() -> None:
    losses = made()
    losses[10:20] += 1.0
    assert find_rate_range(RATES, losses) == find_rate_range(RATES, made())


def test_loss_that_never_rises_is_reported() -> None:
    found = find_rate_range(RATES[:120], made()[:120])
    assert not found.has_risen
    assert found.high == RATES[119]


def test_loss_that_is_not_finite_ends_the_test() -> None:
    losses = made()
    losses[130:] = np.nan
    found = find_rate_range(RATES, losses)
    assert found.has_risen
    assert found.high == RATES[129]


def test_smoothing_is_a_mean_of_neighbours() -> None:
    losses = np.random.default_rng(0).normal(size=83)
    right = [losses[max(i - 2, 0) : i + 3].mean() for i in range(83)]
    np.testing.assert_allclose(smoothed(losses), right)
    np.testing.assert_array_equal(smoothed(losses[:30]), losses[:30])


@pytest.mark.parametrize(
    ("rates", "losses", "text"),
    [
        (RATES[:9], made(), r"^rates: shape \(9,\), losses: \(200,\); give one"),
        (RATES[::-1], made(), r"^rates: they fall; a range test raises them"),
        (RATES[:9], made()[:9], r"^losses: 9 are finite before .* a range needs 10"),
        (RATES, np.full(200, np.inf), r"^losses: 0 are finite before"),
        (RATES, 1.0 + RATES, r"^losses: they never fall below the first, 1\.0"),
    ],
)
def test_what_shows_no_range_is_refused(rates, losses, text) -> None:
    with pytest.raises(ValueError, match=text):
        find_rate_range(rates, losses)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_share_that_is_no_fraction_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=rf"share={share} must be between 0 and 1"):
        find_rate_range(RATES, made(), share=share)
