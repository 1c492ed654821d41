"""Is a weighted loss its total over its weight, and a plain one a mean over rows?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.step.weighted import Weighted, as_weighted, mean


def test_plain_mean_becomes_its_sum_over_the_rows():
    found = as_weighted(2.5, "loss", 4)
    assert (float(found.total), float(found.weight)) == (10.0, 4.0)


@pytest.mark.parametrize("value", [jnp.bfloat16(2), np.float64(2), 2, np.int32(2)])
def test_parts_become_fp32(value):
    for given in (value, Weighted(value, value)):
        found = as_weighted(given, "loss", 3)
        assert found.total.dtype == found.weight.dtype == jnp.float32


def test_weighted_is_kept_whatever_the_rows():
    found = as_weighted(Weighted(6.0, 4.0), "loss", 100)
    assert (float(found.total), float(found.weight)) == (6.0, 4.0)


def test_half_precision_mean_is_summed_in_fp32():
    assert float(as_weighted(jnp.float16(8.0), "loss", 2**16).total) == 2.0**19
    assert float(as_weighted(jnp.bfloat16(1.5), "loss", 2049).total) == 1.5 * 2049


def test_sums_of_parts_divide_to_the_mean_over_all_rows():
    rng = np.random.default_rng(0)
    losses, weights = rng.random(12), rng.random(12)
    parts = [
        Weighted((losses[i] * weights[i]).sum(), weights[i].sum())
        for i in (slice(0, 3), slice(3, 12))
    ]
    total = jax.tree.map(lambda *x: jnp.float32(sum(x)), *parts)
    expected = np.average(losses, weights=weights)
    assert float(mean(total)) == pytest.approx(expected, rel=1e-6)


def test_zero_weight_gives_zero_and_a_zero_gradient():
    def loss(x):
        return mean(Weighted(x * 0.0, jnp.float32(0.0)))

    value, grad = jax.value_and_grad(loss)(jnp.float32(3.0))
    assert (float(value), float(grad)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (jnp.ones(3), r"has shape \(3,\)"),
        (np.ones((1, 1)), r"has shape \(1, 1\)"),
        (Weighted(jnp.ones(2), 1.0), r"has shape \(2,\)"),
        (Weighted(1.0, jnp.ones(2)), r"has shape \(2,\)"),
        (None, "is None"),
        ([1.0], r"is \[1\.0\]"),
        ({"loss": 1.0}, r"is \{'loss': 1\.0\}"),
        ("x", "is 'x'"),
    ],
)
def test_value_that_is_no_scalar_raises(value, found):
    message = (
        rf"loss_fn: accuracy {found}, but must be a scalar\. Return a mean over the "
        r"examples \(\.mean\(\)\), or jaxpar\.Weighted\(total, weight\) of two sums"
    )
    with pytest.raises(ValueError, match=message):
        as_weighted(value, "accuracy", 4)
