"""Do the norms of convolutions normalise, and are their gradients those of that?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.channel_norms import BatchNorm, GroupNorm

KINDS = {"group": lambda: GroupNorm(8, 2), "batch": lambda: BatchNorm(8)}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def moved(kind: str) -> Any:
    """A norm whose scale and shift are not at their first values."""
    norm: Any = KINDS[kind]()
    norm.scale[...] = jnp.asarray(1 + normal(8, seed=1))
    norm.bias[...] = jnp.asarray(normal(8, seed=2))
    return norm


def plain(kind: str, x: Any, scale: Any, bias: Any) -> Any:
    """As it would be written, for automatic differentiation."""
    if kind == "group":
        grouped = x.reshape(*x.shape[:3], 2, 4)
        dims = (1, 2, 4)
    else:
        grouped, dims = x, (0, 1, 2)
    mean = grouped.mean(dims, keepdims=True)
    variance = ((grouped - mean) ** 2).mean(dims, keepdims=True)
    return ((grouped - mean) / (variance + 1e-5) ** 0.5).reshape(x.shape) * scale + bias


@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_its_gradients_are_those_of_its_definition(kind: str):
    graphdef, params, rest = nnx.split(moved(kind), nnx.Param, ...)
    x, weights = jnp.asarray(3 * normal(4, 2, 3, 8) + 2), normal(4, 2, 3, 8, seed=3)

    def ours(params: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(graphdef, params, rest, copy=True)(x) * weights).sum()

    def theirs(params: Any, x: jax.Array) -> jax.Array:
        given = params["scale"].get_value(), params["bias"].get_value()
        return (plain(kind, x, *given) * weights).sum()

    own, right = (jax.value_and_grad(f, (0, 1))(params, x) for f in (ours, theirs))
    assert jax.tree.structure(own) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(right), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def test_batch_norm_averages_statistics_of_n_minus_one_degrees():
    norm, x = moved("batch"), 3 * normal(4, 2, 3, 8) + 2
    for _ in range(2):
        norm(jnp.asarray(x))
    share = 1 - 0.9**2
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(norm.mean[...], share * mean, rtol=1e-5)
    want = 0.9**2 + share * variance
    np.testing.assert_allclose(norm.variance[...], want, rtol=1e-5)


def test_batch_norm_evaluates_with_its_averages():
    norm, x = moved("batch"), 3 * normal(4, 2, 3, 8) + 2
    norm.mean[...] = jnp.asarray(normal(8, seed=4))
    norm.variance[...] = jnp.asarray(np.square(normal(8, seed=5)))
    norm.eval()
    before = jax.tree.leaves(nnx.state(norm))
    y = norm(jnp.asarray(x))
    want = (x - norm.mean[...]) / np.sqrt(norm.variance[...] + 1e-5)
    want = want * norm.scale[...] + norm.bias[...]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    after = jax.tree.leaves(nnx.state(norm))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    np.testing.assert_allclose(norm(jnp.asarray(x[:1])), y[:1], rtol=1e-6)


def test_batch_of_one_place_has_a_variance():
    norm = BatchNorm(2)
    norm(jnp.ones((1, 1, 1, 2)))
    np.testing.assert_allclose(norm.variance[...], [0.9, 0.9])


@pytest.mark.parametrize("kind", KINDS)
def test_norm_keeps_its_input_and_no_second_map(kind: str):
    graphdef, params, rest = nnx.split(moved(kind), nnx.Param, ...)
    x = jnp.asarray(normal(4, 6, 6, 8), jnp.bfloat16)

    def call(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params, rest, copy=True)(x)

    y, vjp = jax.vjp(call, params, x)
    assert y.dtype == jnp.bfloat16
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= x.size]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]


def test_groups_that_do_not_divide_the_channels_raise():
    with pytest.raises(ValueError, match=r"num_groups=6 must divide width=8; use 2"):
        GroupNorm(8, 6)
