"""Is an optax update called as optax says, and its result kept only if applied?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.optim.optax_update import OptaxUpdate

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0])}
GRADS = {"w": jnp.array([0.5, 0.25, -1.0])}


def apply(update: OptaxUpdate, grads: Any = None, *, applied: bool = True) -> Any:
    state = update.optimizer.init(PARAMS)
    return update.apply(
        GRADS if grads is None else grads,
        PARAMS,
        state,
        factor=jnp.float32(0.5),
        applied=jnp.bool_(applied),
        loss=jnp.float32(7.0),
    )


def test_step_is_optaxs_of_the_gradients_times_the_factor():
    optimizer = optax.adam(0.1)
    params, state, metrics = apply(OptaxUpdate(optimizer, (), 1))
    half = jax.tree.map(lambda x: 0.5 * x, GRADS)
    updates, right_state = optimizer.update(half, optimizer.init(PARAMS), PARAMS)
    right = optax.apply_updates(PARAMS, updates), right_state
    assert jax.tree.all(jax.tree.map(np.array_equal, (params, state), right))
    assert metrics == {}


def test_step_that_is_not_applied_changes_nothing():
    """Not even the state's counter, and whatever the gradients are."""
    optimizer = optax.adam(0.1)
    nan = jax.tree.map(lambda x: x * jnp.nan, GRADS)
    params, state, _ = apply(OptaxUpdate(optimizer, (), 1), nan, applied=False)
    before = PARAMS, optimizer.init(PARAMS)
    assert jax.tree.all(jax.tree.map(np.array_equal, (params, state), before))


def test_gradients_in_half_precision_are_multiplied_in_fp32():
    """In fp16 the product would underflow to zero."""
    small = {"w": jnp.full(3, 2.0**-24, jnp.float16)}
    optimizer = optax.sgd(2.0**24)
    params, _, _ = apply(OptaxUpdate(optimizer, (), 1), small)
    np.testing.assert_array_equal(params["w"], PARAMS["w"] - 0.5)


@pytest.mark.parametrize("extras", [(), ("value",), ("value", "grad")])
def test_update_gets_the_extras_that_it_takes(extras):
    """It returns what it was given as its state."""
    zeros = {"value": jnp.float32(0), "grad": jax.tree.map(jnp.zeros_like, GRADS)}

    def update(grads, state, params=None, **given):
        return grads, given

    optimizer = optax.GradientTransformationExtraArgs(
        lambda params: {name: zeros[name] for name in extras}, update
    )
    _, seen, _ = apply(OptaxUpdate(optimizer, extras, 1))
    assert set(seen) == set(extras)
    if "value" in seen:
        assert float(seen["value"]) == 7
    if "grad" in seen:
        np.testing.assert_array_equal(seen["grad"]["w"], 0.5 * GRADS["w"])


def test_learning_rate_in_the_state_is_reported():
    optimizer = optax.inject_hyperparams(optax.sgd)(optax.constant_schedule(0.25))
    _, _, metrics = apply(OptaxUpdate(optimizer, (), 1))
    assert float(metrics["learning_rate"]) == 0.25


def test_notes_tell_of_loops_that_are_divided():
    assert OptaxUpdate(optax.sgd(0.1), (), 1).notes() == ()
    (note,) = OptaxUpdate(optax.sgd(0.1), (), 4).notes()
    assert note.startswith("optimizer: its loops of matmuls are divided among the data")
