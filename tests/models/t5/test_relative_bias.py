"""Are the buckets T5's, and is a bias that of its bucket, with its gradient?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.t5.relative_bias import DistanceBuckets, relative_bias
from tests.models.t5.reference import bucket


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num", "most"), [(32, 128), (8, 20), (4, 3), (64, 1000)])
def test_buckets_are_those_of_the_definition(num: int, most: int, causal: bool) -> None:
    distances = np.arange(-1100, 1100)
    found = DistanceBuckets(num, most, causal=causal).of(distances)
    right = [bucket(int(d), num, most, causal=causal) for d in distances]
    # At the edge of a bucket fp32 may round to either side.
    assert np.mean(found != right) < 2e-3
    assert np.abs(found - right).max() <= 1
    assert set(found) == set(range(num)) - ({num // 2} if not causal else set())


def test_published_buckets_are_as_they_are_known() -> None:
    """32 buckets to 128, as transformers has them."""
    distances = np.array([-200, -127, -20, -16, -15, 0, 1, 7, 8, 16, 90, 91, 300])
    causal = DistanceBuckets(32, 128, causal=True).of(distances)
    assert causal.tolist() == [31, 31, 17, 16, 15, *[0] * 8]
    both = DistanceBuckets(32, 128, causal=False).of(distances)
    assert both.tolist() == [15, 15, 10, 10, 9, 0, 17, 23, 24, 26, 30, 31, 31]


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 6), (6, 1), (3, 7), (7, 3)])
def test_a_bias_is_looked_up_by_distance(queries: int, keys: int) -> None:
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    buckets = DistanceBuckets(8, 6, causal=False)
    distances = np.arange(keys) - np.arange(queries)[:, None]
    numbers = buckets.of(distances)

    def plainly(table: jax.Array) -> jax.Array:
        return table[numbers].transpose(2, 0, 1)

    found = relative_bias(table, buckets, queries, keys)
    np.testing.assert_array_equal(found, plainly(table))
    weights = rng.normal(size=found.shape)

    def grad_of(look_up) -> jax.Array:
        return jax.grad(lambda x: (look_up(x) * weights).sum())(table)

    own = grad_of(lambda x: relative_bias(x, buckets, queries, keys))
    np.testing.assert_allclose(own, grad_of(plainly), rtol=1e-5, atol=1e-6)


def test_the_gradient_needs_no_scatter() -> None:
    buckets, table = DistanceBuckets(8, 6, causal=True), jnp.ones((8, 3))
    program = jax.make_jaxpr(
        jax.grad(lambda x: jnp.sin(relative_bias(x, buckets, 9, 9)).sum())
    )(table)
    assert "scatter" not in str(program)
    assert "gather" not in str(program)
