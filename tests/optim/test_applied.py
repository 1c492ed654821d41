"""Is an update that may not be applied one pass over its state, and right?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.optim.applied import updated_if

PARAMS = {"a": jnp.linspace(-1.0, 1.0, 4096).reshape(64, 64), "b": jnp.ones(128)}
GRADS = jax.tree.map(lambda x: 0.5 * x + 0.1, PARAMS)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "bf16 moments": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "noisy": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "accumulating": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "stateless": optax.sgd(0.1),
}


def stepped(optimizer: Any, before: Any, grads: Any) -> Any:
    params, opt_state = before
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def numbers_in(state: Any) -> list[jax.Array]:
    leaves = jax.tree.leaves(state)
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        jax.random.key_data(leaf) if key else leaf
        for leaf, key in zip(leaves, is_key, strict=True)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("applied", [True, False])
def test_state_is_the_new_or_the_old_one(name: str, applied: bool) -> None:
    optimizer = OPTIMIZERS[name]

    def step(before: Any, grads: Any) -> Any:
        return stepped(optimizer, before, grads)

    run = jax.jit(lambda which, *args: updated_if(which, step, *args))
    before = jax.jit(step)((PARAMS, optimizer.init(PARAMS)), GRADS)
    grads = GRADS if applied else jax.tree.map(lambda x: x * jnp.nan, GRADS)
    found = run(jnp.bool_(applied), before, grads)
    right = jax.jit(step)(before, grads) if applied else before
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for one, other in zip(*map(numbers_in, (found, right)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6)
        if not applied:
            assert np.array_equal(one, other)


def test_leaf_that_is_another_ones_new_value_keeps_its_own_old_one() -> None:
    """A new value that two leaves get, a constant, and one that is passed on."""

    def step(before: tuple, x: jax.Array) -> tuple:
        first, _, _, last = before
        new = first + x
        return new, new, jnp.float32(7.0), last

    old = tuple(map(jnp.float32, (1.0, 2.0, 3.0, 4.0)))
    run = jax.jit(lambda which: updated_if(which, step, old, jnp.float32(10.0)))
    assert run(jnp.bool_(True)) == (11.0, 11.0, 7.0, 4.0)
    assert run(jnp.bool_(False)) == old


def test_moments_are_updated_without_copies() -> None:
    """XLA:CPU copies old moments that the new parameters would be computed from."""
    optimizer = optax.adamw(1e-3)

    def copies(run: Any) -> int:
        state = PARAMS, optimizer.init(PARAMS)
        lowered = jax.jit(run, donate_argnums=0).lower(state, GRADS)
        return lowered.compile().as_text().count(" copy(")

    def is_finite(grads: Any) -> jax.Array:
        return jnp.isfinite(optax.tree.norm(grads))

    def early(before: Any, grads: Any) -> Any:
        def step(before: Any, grads: Any) -> Any:
            return stepped(optimizer, before, grads)

        return updated_if(is_finite(grads), step, before, grads)

    def late(before: Any, grads: Any) -> Any:
        after = stepped(optimizer, before, grads)
        return optax.tree.where(is_finite(grads), after, before)

    big = 2 * len(PARAMS)
    assert copies(late) >= copies(early) + big
