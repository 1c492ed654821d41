"""Is a block's backward pass split so that both halves together are `jax.vjp`?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline.backward import run_and_keep, trace_pullback

ROWS, D, F = 6, 4, 10


def block(params, x, scale):
    inner = jnp.tanh(x @ params["up"] + params["bias"])
    return x + scale * (inner @ params["down"]), {"scale": scale + 1}


def elementwise(params, x, scale):
    return x * params["bias"][:D] * scale, {}


def flattened(params, x, scale):
    """The weight's gradient is reshaped after its matmul."""
    kernel = params["up"].reshape(-1)[: D * D].reshape(D, D)
    return x + scale * jnp.tanh(x @ kernel), {}


@pytest.fixture
def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"up": (D, F), "bias": (F,), "down": (F, D)}
    params = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return params, jax.random.normal(keys[3], (ROWS, D)), jnp.float32(0.7)


def expected(fn, arguments, cotangent):
    params, x, scale = arguments
    return jax.vjp(lambda p, h: fn(p, h, scale)[0], params, x)[1](cotangent)


def assert_equal(found, right):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fn", [block, elementwise, flattened])
def test_both_halves_together_are_vjp(fn, arguments):
    params, _, scale = arguments
    out, kept, state = run_and_keep(fn, *arguments)
    assert_equal((out, state), fn(*arguments))
    pullback = trace_pullback(fn, *arguments)
    cotangent = jnp.cos(out)
    right = expected(fn, arguments, cotangent)
    given = (params, (scale,))
    assert_equal(pullback.run(kept, given, cotangent), right)
    first, hidden, products = pullback.run_input(kept, given, cotangent)
    second = pullback.run_weights(products)
    assert_equal((jax.tree.map(jnp.add, first, second), hidden), right)


def test_first_half_has_no_matmul_of_a_weight_gradient(arguments):
    """Each half gives zeros for the gradients that the other computes."""
    params, _, scale = arguments
    out, kept, _ = run_and_keep(block, *arguments)
    pullback = trace_pullback(block, *arguments)
    first, _, products = pullback.run_input(kept, (params, (scale,)), jnp.cos(out))
    second = pullback.run_weights(products)
    is_zero = jax.tree.map(lambda x: not np.any(x), (first, second))
    assert is_zero == (
        {"up": True, "bias": False, "down": True},
        {"up": False, "bias": True, "down": False},
    )


@pytest.mark.parametrize(
    ("fn", "deferred"), [(block, 0.5), (elementwise, 0.0), (flattened, 0.5)]
)
def test_deferred_is_the_share_of_weight_matmuls(fn, deferred, arguments):
    """Of a matmul's two gradients, one is the weight's, with as many FLOPs."""
    assert trace_pullback(fn, *arguments).deferred == deferred


def test_products_are_the_operands_of_the_weight_matmuls(arguments):
    """Per kernel an input and a cotangent, [ROWS, D] or [ROWS, F]."""
    shapes = [x.aval.shape for x in trace_pullback(block, *arguments).products]
    assert sorted(shapes) == [(ROWS, D), (ROWS, D), (ROWS, F), (ROWS, F)]


def test_weights_and_other_arguments_are_not_kept(arguments):
    params, _, scale = arguments
    _, kept, _ = run_and_keep(block, *arguments)
    pullback = trace_pullback(block, *arguments)
    places = [at for at in pullback.given if isinstance(at, int)]
    leaves = jax.tree.leaves((params, (scale,)))
    named = {"up": params["up"], "down": params["down"], "scale": scale}
    found = [leaves[at] for at in places]
    for name, leaf in named.items():
        assert any(leaf is each for each in found), name
    shapes = {x.shape for x in kept}
    assert not shapes & {(D, F), (F, D), (F,)}
    assert len(kept) == pullback.given.count(None)


def test_pullback_is_traced_from_shapes_alone(arguments):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    pullback = trace_pullback(block, *shapes)
    out, kept, _ = run_and_keep(block, *arguments)
    params, _, scale = arguments
    found = pullback.run(kept, (params, (scale,)), jnp.cos(out))
    assert_equal(found, expected(block, arguments, jnp.cos(out)))
