"""Are blocks coded within half a step, and in the bytes that are said?

How it trains is in tests/equivalence/test_quantized_reduction.py.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.optim import QuantizedReduction


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1, 64, 100, 256])
def test_an_element_is_off_by_half_a_code_at_most(bits: int, size: int) -> None:
    own = QuantizedReduction(bits=bits, block=64)
    rows = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    rows[1] = 0.0
    coded = own.coded(jnp.asarray(rows))
    blocks = -(-size // 64)
    assert coded.shape == (3, blocks * (64 * bits // 8 + 4))
    assert coded.dtype == jnp.uint8
    found = np.asarray(own.decoded(coded, size))
    for number in range(blocks):
        part = slice(64 * number, 64 * (number + 1))
        step = np.abs(rows[:, part]).max(axis=1, keepdims=True) / own.largest
        assert (np.abs(found - rows)[:, part] <= 0.501 * step).all()


def test_codes_of_codes_are_the_same() -> None:
    own = QuantizedReduction(bits=4, block=8)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24)), jnp.float32)
    once = own.decoded(own.coded(rows), 24)
    np.testing.assert_allclose(own.decoded(own.coded(once), 24), once, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bits": 2}, "bits=2 must be 8 or 4"),
        ({"block": 7}, "block=7 must be even, and at least 8"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QuantizedReduction(**given)
