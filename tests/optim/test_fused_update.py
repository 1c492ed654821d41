"""Does a step on buckets compute what optax does on leaves?

Rounding differs: sums are made in another order (1e-6), and copies are in bf16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.optim import fused_adamw, fused_lamb, fused_lion
from jaxpar.optim.buckets import Buckets
from jaxpar.optim.fused_update import FusedUpdate
from kernels_pallas.fused_optimizers import TILE
from tests.optim.sharded_params import leaf_shardings, make_params, mesh, placed

PAIRS = {
    "adamw": (fused_adamw, optax.adamw),
    "lamb": (fused_lamb, optax.lamb),
    "lion": (fused_lion, optax.lion),
}
SCHEDULE = optax.linear_schedule(0.1, 0.3, 4)
LAMB_8 = fused_lamb(SCHEDULE, bits=8)


def matrices(params: Any) -> Any:
    """What decays: the kernel, and not the stack in the same bucket."""
    return jax.tree.map(lambda x: x.ndim == 2, params)


@functools.cache
def make_update(optimizer: Any, dtype: Any = jnp.float32) -> FusedUpdate:
    like = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_params()))
    return FusedUpdate(optimizer, Buckets(leaf_shardings(), mesh()), like, dtype)


@functools.cache
def step_of(update: FusedUpdate) -> Any:
    """The jitted step; it is compiled once for each update."""

    @jax.jit
    def one(grads: Any, packed: Any, applied: Any) -> Any:
        given = {"factor": jnp.float32(0.5), "loss": jnp.float32(0)}
        grads = update.pack_grads(grads)
        params, state, metrics = update.apply(grads, *packed, **given, applied=applied)
        return (params, state), metrics

    return one


def steps_of(update: FusedUpdate, num: int, *, applied: Any = lambda step: True) -> Any:
    """The logical state after some steps, with gradients that are halved; metrics."""
    params = placed(make_params())
    packed = update.pack(params, placed(jax.jit(update.optimizer.init)(make_params())))
    one, metrics = step_of(update), {}
    for step in range(num):
        grads = placed(make_params(1 + step))
        packed, metrics = one(grads, packed, jnp.bool_(applied(step)))
    return update.unpack(*packed), packed, metrics


def plain_steps(optimizer: Any, steps: Any) -> Any:
    params = jax.tree.map(jnp.asarray, make_params())
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def one(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in steps:
        grads = jax.tree.map(lambda x: np.float32(0.5) * x, make_params(1 + step))
        params, state = one(grads, state, params)
    return params, state


def assert_close(tree: Any, right: Any, **tolerance: float) -> None:
    tree, right = jax.device_get((tree, right))
    assert jax.tree.structure(tree) == jax.tree.structure(right)
    for leaf, other in zip(*map(jax.tree.leaves, (tree, right)), strict=True):
        np.testing.assert_allclose(leaf, other, **({"rtol": 2e-6} | tolerance))


@pytest.mark.parametrize("name", PAIRS)
def test_three_steps_equal_optax(name: str):
    """With a schedule, weight decay, a mask, and gradients times a factor."""
    given = {"weight_decay": 0.1, "mask": matrices}
    fused, plain = (make(SCHEDULE, **given) for make in PAIRS[name])
    got, _, metrics = steps_of(make_update(fused), 3)
    assert_close(got, plain_steps(plain, range(3)), atol=1e-6)
    # The rate of the step that was taken: steps count from 0.
    assert float(metrics["learning_rate"]) == pytest.approx(float(SCHEDULE(2)))


def test_first_step_of_eight_bits_equals_optax():
    """Moments are rounded only after it; a code is within 1 / 32 of its number."""
    fused, plain = fused_adamw(0.1, bits=8), optax.adamw(0.1)
    (params, state), _, _ = steps_of(make_update(fused), 1)
    right, right_state = plain_steps(plain, range(1))
    assert_close(params, right, atol=1e-6)
    assert_close(state[0].mu, right_state[0].mu, rtol=0.04, atol=1e-3)


def test_step_that_is_not_applied_changes_nothing():
    """Nor the count that its schedule goes by."""
    update = make_update(LAMB_8, jnp.bfloat16)
    _, once, _ = steps_of(update, 1)
    _, twice, _ = steps_of(update, 2, applied=lambda step: step == 0)
    assert jax.tree.all(jax.tree.map(np.array_equal, once, twice))


def test_copies_follow_their_masters():
    update = make_update(LAMB_8, jnp.bfloat16)
    (params, _), packed, _ = steps_of(update, 2)
    copies = update.compute_params(packed[0])
    for name, leaf in params.items():
        assert copies[name].dtype == jnp.bfloat16
        assert np.array_equal(copies[name], leaf.astype(jnp.bfloat16))


def test_masters_are_computed_with_in_fp32_and_there_are_no_copies():
    update = make_update(fused_lion(0.1))
    (params, _), packed, _ = steps_of(update, 0)
    assert list(packed[0]) == ["masters"]
    assert_close(params, make_params(), rtol=0)
    assert_close(update.compute_params(packed[0]), make_params(), rtol=0)


def test_notes_have_the_padding_and_the_bytes_of_the_leaves():
    used = 6 + 576 + 128  # Elements of a device: sharded_params.
    padding = 1 - used / (3 * TILE)
    buckets, leaves = make_update(fused_adamw(0.1, bits=8)).notes()
    assert (
        f"3 leaves are in buckets (whole, over_data_tensor), of which {padding:.1%}"
        in (buckets)
    )
    assert f"{3 * 4 * used / 1e9:.2g} GB more on a device" in leaves
    assert (
        f"{2 * 4 * used / 1e9:.2g} GB more" in make_update(fused_lion(0.1)).notes()[1]
    )
