"""Is a block's backward pass split so that both halves together are `jax.vjp`?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline.backward import run_and_keep, trace_pullback

ROWS, D, F = 6, 4, 10


def block(params, x, frozen, scale):
    del frozen
    inner = jnp.tanh(x @ params["up"] + params["bias"])
    return x + scale * (inner @ params["down"]), {"scale": scale + 1}


def elementwise(params, x, frozen, scale):
    del frozen
    return x * params["bias"][:D] * scale, {}


def flattened(params, x, frozen, scale):
    """The weight's gradient is reshaped after its matmul."""
    del frozen
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
    return params, jax.random.normal(keys[3], (ROWS, D)), {}, jnp.float32(0.7)


def expected(fn, arguments, cotangent):
    params, x, *others = arguments
    return jax.vjp(lambda p, h: fn(p, h, *others)[0], params, x)[1](cotangent)


def assert_equal(found, right):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fn", [block, elementwise, flattened])
def test_both_halves_together_are_vjp(fn, arguments):
    params, _, *others = arguments
    out, kept, state = run_and_keep(fn, *arguments)
    assert_equal((out, state), fn(*arguments))
    pullback = trace_pullback(fn, *arguments)
    cotangent = jnp.cos(out)
    right = expected(fn, arguments, cotangent)
    given = (params, tuple(others))
    assert_equal(pullback.run(kept, given, cotangent), right)
    first, hidden, products = pullback.run_input(kept, given, cotangent)
    second = pullback.run_weights(products)
    assert_equal((jax.tree.map(jnp.add, first, second), hidden), right)


def test_first_half_has_no_matmul_of_a_weight_gradient(arguments):
    """Each half gives zeros for the gradients that the other computes."""
    params, _, *others = arguments
    out, kept, _ = run_and_keep(block, *arguments)
    pullback = trace_pullback(block, *arguments)
    first, _, products = pullback.run_input(kept, (params, tuple(others)), jnp.cos(out))
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
    params, _, *others = arguments
    _, kept, _ = run_and_keep(block, *arguments)
    pullback = trace_pullback(block, *arguments)
    places = [at for at in pullback.given if isinstance(at, int)]
    leaves = jax.tree.leaves((params, others))
    named = {"up": params["up"], "down": params["down"], "scale": others[1]}
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
    params, _, *others = arguments
    found = pullback.run(kept, (params, tuple(others)), jnp.cos(out))
    assert_equal(found, expected(block, arguments, jnp.cos(out)))


def adapted(params, x, frozen, scale):
    """Frozen kernels of 8 and 16 bits beside trained biases; one shared constant."""
    down = frozen["down"].astype(x.dtype) * frozen["scale"]
    inner = jnp.tanh(x @ frozen["up"].astype(x.dtype) + params["bias"])
    return x + scale * (inner @ down), {"used": frozen["scale"]}


def branching(params, x, frozen, scale):
    """A custom derivative's call gives results of a frozen leaf and of another."""
    up, double = _both(frozen["up"].astype(x.dtype), scale)
    return x + double * (jnp.tanh(x @ up + params["bias"]) @ up.T), {}


@jax.custom_vjp
def _both(one, other):
    return one * 2, other * 2


_both.defvjp(lambda x, y: (_both(x, y), None), lambda _, cotangents: cotangents)


@pytest.fixture
def frozen(arguments):
    params, x, _, scale = arguments
    own = {
        "up": params["up"].astype(jnp.bfloat16),
        "down": jnp.round(9 * params["down"]).astype(jnp.int8),
        "scale": jnp.full(D, 0.1),
    }
    return {"bias": params["bias"]}, x, own, scale


@pytest.mark.parametrize("fn", [adapted, branching])
def test_pullback_of_frozen_leaves_is_vjp_of_the_others(fn, frozen):
    params, _, *others = frozen
    out, kept, state = run_and_keep(fn, *frozen)
    assert_equal((out, state), fn(*frozen))
    pullback = trace_pullback(fn, *frozen)
    right, given = expected(fn, frozen, jnp.cos(out)), (params, tuple(others))
    assert_equal(pullback.run(kept, given, jnp.cos(out)), right)
    first, hidden, products = pullback.run_input(kept, given, jnp.cos(out))
    second = pullback.run_weights(products)
    assert_equal((jax.tree.map(jnp.add, first, second), hidden), right)


def test_residuals_of_frozen_leaves_alone_are_computed_again(frozen):
    """A kernel cast to fp32 would be as large as the kernel that is not trained."""
    _, kept, _ = run_and_keep(adapted, *frozen)
    pullback = trace_pullback(adapted, *frozen)
    again = {str(x.aval) for x in pullback.again.jaxpr.outvars}
    assert again >= {f"float32[{D},{F}]", f"float32[{F},{D}]"}
    assert not {x.shape for x in kept} & {(D, F), (F, D), (D,)}
    assert len(kept) == pullback.given.count(None)


def test_deferred_share_is_of_the_weights_that_are_trained(frozen):
    """The backward of an adapter's two matmuls, and of a frozen one, has five."""

    def fn(params, x, frozen):
        return x @ frozen["up"] @ params["a"] @ params["b"], {}

    up = jnp.ones((D, F))
    adapters = {"a": jnp.ones((F, 2)), "b": jnp.ones((2, D))}
    # FLOPs, by 2 ROWS: gradients of a and b; of their inputs, and of the kernel's.
    deferred, rest = F * 2 + 2 * D, F * 2 + 2 * D + D * F
    found = trace_pullback(fn, adapters, frozen[1], {"up": up}).deferred
    assert found == pytest.approx(deferred / (deferred + rest))
