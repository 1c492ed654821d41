"""Does a token go to its most probable experts, and are their uses counted?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.experts.routing import route, statistics_of

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(40, 5)), jnp.float32)


@pytest.mark.parametrize("normalise", [True, False])
def test_gates_are_the_largest_probabilities(normalise: bool) -> None:
    found = route(LOGITS, 3, normalise=normalise)
    probs = np.asarray(jax.nn.softmax(LOGITS))
    for own, experts, gates in zip(probs, found.experts, found.gates, strict=True):
        right = np.argsort(-own)[:3]
        np.testing.assert_array_equal(experts, right)
        scale = own[right].sum() if normalise else 1
        np.testing.assert_allclose(gates, own[right] / scale, rtol=1e-6)


def test_padding_goes_nowhere_and_does_not_count() -> None:
    is_token = jnp.arange(40) < 30
    found = route(LOGITS, 2, is_token_N=is_token)
    assert (np.asarray(found.experts[30:]) == 5).all()
    np.testing.assert_array_equal(found.experts[:30], route(LOGITS[:30], 2).experts)
    own, right = statistics_of(found), statistics_of(route(LOGITS[:30], 2))
    np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-6)


def test_statistics_are_their_definitions() -> None:
    found = route(LOGITS, 2)
    kept = jnp.asarray(np.random.default_rng(1).random((40, 2)) < 0.7)
    own = statistics_of(found, kept)
    load = np.bincount(np.asarray(found.experts).reshape(-1), minlength=5) / 40
    importance = np.asarray(jax.nn.softmax(LOGITS)).mean(0)
    assert float(own.balance) == pytest.approx(5 * (load * importance).sum(), rel=1e-5)
    z = np.square(np.log(np.exp(np.asarray(LOGITS)).sum(-1))).mean()
    assert float(own.router_z) == pytest.approx(z, rel=1e-5)
    assert float(own.largest_load) == pytest.approx(load.max() * 5 / 2, rel=1e-5)
    assert float(own.dropped) == pytest.approx(1 - np.asarray(kept).mean(), rel=1e-5)


def test_even_use_has_the_smallest_balance() -> None:
    even = route(jnp.tile(10 * jnp.eye(4), (8, 1)), 1)
    one = route(jnp.tile(10 * jnp.eye(4)[:1], (32, 1)), 1)
    assert float(statistics_of(even).balance) == pytest.approx(1, rel=1e-5)
    assert float(statistics_of(one).balance) == pytest.approx(4, rel=1e-2)
    assert float(statistics_of(one).largest_load) == 4
    assert float(statistics_of(even).dropped) == 0


def test_no_token_at_all_is_no_nan() -> None:
    found = route(LOGITS, 2, is_token_N=jnp.zeros(40, bool))
    assert np.isfinite(np.asarray(statistics_of(found)[:3])).all()
