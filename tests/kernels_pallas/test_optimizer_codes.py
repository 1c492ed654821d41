"""Are 8-bit codes the nearest of their grid, at any size of the largest?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.fused_optimizers.codes import ROOTS, SIGNED, Code

CODES = [pytest.param(SIGNED, id="signed"), pytest.param(ROOTS, id="roots")]


@pytest.mark.parametrize("code", CODES)
def test_codes_are_kept_by_a_round_trip(code: Code) -> None:
    info = np.iinfo(code.dtype)
    least = -info.max if code is SIGNED else 0
    codes = jnp.arange(least, info.max + 1).astype(code.dtype)
    values = np.asarray(jax.jit(code.decode)(codes))
    assert (np.diff(values) > 0).all()
    assert values[-1] == 1
    assert (values == 0).sum() == 1
    assert np.array_equal(jax.jit(code.encode)(values), codes)


def grid_of(code: Code) -> np.ndarray:
    """What codes from 0 on stand for: the ends of 2^E steps in each power of 16."""
    ends = [
        (1 + 15 * (np.arange(2**power) + 1) / 2**power)
        / 16
        * 16.0 ** (power - code.top)
        for power in range(code.top + 1)
    ]
    return np.concatenate([[0.0], *ends])


@pytest.mark.parametrize("code", CODES)
def test_codes_are_the_nearest_of_the_grid(code: Code) -> None:
    """On both sides of each middle between two of them; and at 16^-k, from which on
    steps are longer."""
    grid = grid_of(code)
    codes = np.arange(grid.size)
    assert np.array_equal(jax.jit(code.decode)(codes.astype(code.dtype)), grid)
    encode = jax.jit(code.encode)
    middles, within = (grid[1:-1] + grid[2:]) / 2, 1e-6
    for x, expected in (
        (middles * (1 - within), codes[1:-1]),
        (middles * (1 + within), codes[2:]),
        (np.nextafter(np.float32(grid), np.float32(0)), codes),
        (np.nextafter(np.float32(grid[1:]), np.float32(2)), codes[1:]),
    ):
        assert np.array_equal(encode(np.float32(x)), expected)
        if code is SIGNED:
            assert np.array_equal(encode(-np.float32(x)), -expected)


@pytest.mark.parametrize("code", CODES)
def test_codes_below_the_least_are_0_for_signed_elements_alone(code: Code) -> None:
    least = grid_of(code)[1]
    x = np.float32([0.5 * least, 1e-2 * least, 1e-30, 1.2e-38, 0.0])
    expected = [0] * 5 if code is SIGNED else [1, 1, 1, 1, 0]
    assert np.array_equal(jax.jit(code.encode)(x), expected)


@pytest.mark.parametrize("largest", [1e-28, 3e-5, 1.0, 7e20])
@pytest.mark.parametrize("code", CODES)
def test_codes_do_not_depend_on_the_largest(code: Code, largest: float) -> None:
    """Nor do they change in a round trip, at any size that fp32 has."""
    codes = np.arange(grid_of(code).size).astype(code.dtype)
    values = jax.jit(code.decode)(codes, largest)
    np.testing.assert_allclose(values, grid_of(code) * largest, rtol=1e-6)
    assert np.array_equal(jax.jit(code.encode)(values, largest), codes)


@pytest.mark.parametrize("code", CODES)
def test_elements_get_the_nearest_code(code: Code) -> None:
    info, rng = np.iinfo(code.dtype), np.random.default_rng(0)
    codes = np.arange(-info.max if code is SIGNED else 0, info.max + 1)
    decode = jax.jit(code.decode)
    values = np.asarray(decode(codes.astype(code.dtype)))
    x = np.concatenate([rng.random(2000), 16 ** rng.uniform(-6.9, 0, 2000)])
    x = np.float32(x * rng.choice([-1, 1], x.size) if code is SIGNED else x)
    found = np.asarray(decode(jax.jit(code.encode)(x)))
    nearest = np.abs(x[:, None] - values).min(axis=1)
    # Where two are as near, rounding decides; below the least, 0.53 of it.
    least = values[values > 0].min()
    far = nearest * (1 + 1e-4) + 1e-7 * np.abs(x) + 0.07 * least
    assert (np.abs(found - x) <= far).all()
