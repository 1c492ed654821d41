"""Are queries and keys rotated by the angles of their positions?"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.rotary import RotaryScaling, rotate, rotation_at


def test_rotate_turns_pairs_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 1000, size=(2, 5))
    frequency = 10_000.0 ** (-2 * np.arange(4) / 8)
    turn = np.exp(1j * positions[..., None] * frequency)[:, :, None]
    pairs = (x[..., :4] + 1j * x[..., 4:]) * turn
    want = np.concatenate([pairs.real, pairs.imag], -1)
    got = rotate(jnp.asarray(x), rotation_at(jnp.asarray(positions), 8))
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_rotate_makes_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 1, 1, 16))) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        turned = (
            rotate(x, rotation_at(jnp.array([[position]]), 16))
            for x, position in ((query, query_position), (key, key_position))
        )
        return float(jnp.vdot(*turned))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def frequencies(scaling: RotaryScaling | None) -> np.ndarray:
    """By a position of 1, where angles are below half a turn."""
    cosine, sine = rotation_at(jnp.array([[1]]), 16, scaling=scaling)
    return np.arctan2(sine, cosine)[0, 0]


def test_linear_scaling_divides_all_frequencies():
    scaled = frequencies(RotaryScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(scaled, frequencies(None) / 4, rtol=1e-5)


def test_llama3_scales_long_wavelengths_and_keeps_short_ones():
    """Rows of 64 tokens: wavelengths above 64 are stretched, below 16 kept."""
    plain = frequencies(None)
    scaled = frequencies(RotaryScaling(factor=8.0, original_len=64))
    wavelengths = 2 * np.pi / plain
    long, short = wavelengths > 64, wavelengths < 16
    between = ~long & ~short
    assert min(long.sum(), short.sum(), between.sum()) > 0
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-5)
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-5)
    assert (scaled[between] < plain[between]).all()
    assert (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize("fields", [{"factor": 0.0}, {"low": 4.0, "high": 4.0}])
def test_scaling_that_can_not_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"RotaryScaling: factor=.* above 0"):
        RotaryScaling(**fields)
