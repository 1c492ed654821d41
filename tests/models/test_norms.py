"""Do the norms normalise, and are their gradients those of their definition?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.norms import LayerNorm, RMSNorm


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_layer_norm_equals_numpy():
    norm: Any = LayerNorm(6)
    norm.scale[...] = jnp.asarray(normal(6, seed=1))
    norm.bias[...] = jnp.asarray(normal(6, seed=2))
    x = normal(2, 3, 6) * 5 + 1
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    want = want * normal(6, seed=1) + normal(6, seed=2)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)


def test_rms_norm_equals_numpy():
    norm = RMSNorm(6)
    norm.scale[...] = jnp.asarray(normal(6, seed=1))
    x = normal(2, 3, 6) * 5 + 1
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * normal(6, seed=1)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [LayerNorm(256), RMSNorm(256)])
def test_norm_of_half_precision_takes_statistics_in_fp32(norm: LayerNorm | RMSNorm):
    # Squares of 300 overflow fp16, whose largest number is 65,504.
    x = (300 * normal(1, 256)).astype(np.float16)
    y = norm(jnp.asarray(x))
    assert y.dtype == jnp.float16
    want = norm(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("norm", [LayerNorm(8), RMSNorm(8)])
def test_norm_keeps_its_input_and_two_numbers_a_row(norm: LayerNorm | RMSNorm):
    graphdef, state = nnx.split(norm)
    x = jnp.asarray(normal(4, 8), jnp.bfloat16)
    _, vjp = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= x.size]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]
    rows = [leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == (4, 1)]
    assert len(rows) == (2 if isinstance(norm, LayerNorm) else 1)


def plain(norm: LayerNorm | RMSNorm, x: jax.Array) -> jax.Array:
    """As it would be written, for automatic differentiation."""
    wide = x.astype(jnp.float32)
    if isinstance(norm, LayerNorm):
        wide = wide - wide.mean(-1, keepdims=True)
    y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    y = y * norm.scale[...].astype(jnp.float32)
    bias = getattr(norm, "bias", None)
    return (y if bias is None else y + bias[...].astype(jnp.float32)).astype(x.dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "norm", [LayerNorm(32), LayerNorm(32, bias=False), RMSNorm(32)]
)
def test_gradients_are_those_of_automatic_differentiation(norm: Any, dtype: Any):
    norm.scale[...] = jnp.asarray(normal(32, seed=1))
    graphdef, state = nnx.split(norm)
    state = jax.tree.map(lambda leaf: leaf.astype(dtype), state)
    x = jnp.asarray(3 * normal(4, 5, 32, seed=2) + 2, dtype)
    weights = jnp.asarray(normal(4, 5, 32, seed=3))

    def grads(call: Any, to: Any) -> list[np.ndarray]:
        def total(state: Any, x: jax.Array) -> jax.Array:
            y = call(nnx.merge(graphdef, state), x)
            return (y.astype(jnp.float32) * weights).sum()

        given = jax.tree.map(lambda leaf: leaf.astype(to), (state, x))
        found = jax.grad(total, (0, 1))(*given)
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]

    wanted = grads(plain, jnp.float32)
    most = 1e-5 if dtype == jnp.float32 else 1e-2
    for own, other in zip(grads(lambda n, x: n(x), dtype), wanted, strict=True):
        assert np.linalg.norm(own - other) < most * np.linalg.norm(other)
