"""Are blocks coded within half a step, and in the bytes that are said?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.sharding.block_codes import BlockCodes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1, 64, 100, 256])
def test_an_element_is_off_by_half_a_code_at_most(bits: int, size: int) -> None:
    own = BlockCodes(bits=bits, block=64)
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
    own = BlockCodes(bits=4, block=8)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24)), jnp.float32)
    once = own.decoded(own.coded(rows), 24)
    np.testing.assert_allclose(own.decoded(own.coded(once), 24), once, rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    own = BlockCodes(4, block=8)
    rows = jnp.zeros((1, 16)).at[0, 3].set(wrong)
    found = np.asarray(own.decoded(own.coded(rows), 16))
    assert not np.isfinite(found[0, 3])
    assert not found[0, 8:].any()  # Another block.


def test_collectives_gather_scatter_and_sum_within_rounding() -> None:
    own, rng = BlockCodes(8, block=16), np.random.default_rng(0)
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=4), jax.devices()[:4])
    arrays = rng.normal(size=(4, 6, 8)).astype(np.float32)

    def body(x: jax.Array) -> tuple:
        gathered = own.gathered(x[0], 1, ("data",))
        part, left = own.scattered(x[0], 1, ("data",))
        whole, _ = own.summed(x[0], ("data",))
        return gathered, part, left[None], whole

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P(), P(None, "data"), P("data"), P()),
        axis_names={"data"},
        check_vma=False,
    )
    gathered, parts, left, whole = jax.device_get(jax.jit(run)(arrays))
    assert gathered.shape == (6, 32)
    np.testing.assert_allclose(gathered, np.concatenate(arrays, 1), atol=2e-2)
    total = arrays.sum(0)
    np.testing.assert_allclose(whole, total, atol=5e-2)
    # What is sent and what is left out add up to what there was.
    np.testing.assert_allclose(parts + left.sum(0), total, atol=1e-5)
    assert np.abs(left).max() > 1e-4


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="bits=3 must be 8 or 4"):
        BlockCodes(3)
    with pytest.raises(ValueError, match="block=7 must be even, and at least 8"):
        BlockCodes(8, block=7)
