"""Does a checkpoint inside another keep only what it would keep alone?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies

from jaxpar.jaxprs.residuals import with_own_residuals

X, W = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), jnp.linspace(0.0, 1.0, 9).reshape(3, 3)


def layer(args):
    x, kernel = args
    return jnp.sin(jnp.sin(x @ kernel))


def everything_but_nothing(prim, *_, **__):
    """A policy of whoever is outside: keep all."""
    return True


def kept(wrap, policy=None) -> int:
    """How many arrays the backward pass of a nested checkpoint is given."""

    @jax.checkpoint
    def inner(args):
        return layer(args)

    if policy is not None:
        inner = jax.checkpoint(layer, policy=policy)
    outer = jax.checkpoint(
        lambda x, w: jnp.cos(wrap(inner)((x, w))).sum(), policy=everything_but_nothing
    )
    _, pull = jax.vjp(outer, X, W)
    return len(jax.tree.leaves(pull))


def test_without_it_the_outer_policy_undoes_the_inner():
    assert kept(with_own_residuals) < kept(lambda run: run)


def test_the_inner_policy_still_decides():
    dots = checkpoint_policies.dots_saveable
    assert kept(with_own_residuals, dots) == kept(with_own_residuals) + 1


@pytest.mark.parametrize("outer", [False, True])
def test_gradients_are_the_same(outer):
    run = with_own_residuals(jax.checkpoint(layer))
    wrap = jax.checkpoint if outer else lambda f: f
    plain = jax.grad(lambda a: layer(a).sum())((X, W))
    ours = jax.grad(wrap(lambda a: run(a).sum()))((X, W))
    jax.tree.map(np.testing.assert_allclose, plain, ours)


def test_only_what_moves_is_differentiated():
    """A scan over layers: integers, keys and unmoved arrays pass through."""

    def step(x, layer_number):
        def add(args):
            x, number, key, unmoved = args
            noise = jax.random.normal(key, x.shape)
            return x * jnp.sin(unmoved) + number + noise, number + 1

        x, _ = with_own_residuals(jax.checkpoint(add))(
            (x, layer_number, jax.random.key(0), W[0])
        )
        return x, None

    def total(x):
        return jax.lax.scan(step, x, jnp.arange(3))[0].sum()

    expected = np.broadcast_to(np.sin(np.asarray(W[0])) ** 3, X.shape)
    np.testing.assert_allclose(jax.grad(total)(X), expected, rtol=1e-6)


def test_a_result_that_nobody_uses_has_no_cotangent():
    run = with_own_residuals(lambda args: (args[0] * 2.0, args[0] * 3.0, jnp.int32(1)))
    assert float(jax.grad(lambda x: run((x,))[0])(1.0)) == 2.0
