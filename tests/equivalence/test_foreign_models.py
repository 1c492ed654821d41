"""Do models that we did not write train, unchanged and without a rule, at every stage?

Losses of five steps to 1e-5 relative across stages and, where nothing is random, of the
plain loop; parameters and running statistics after them to 1e-5 by leaf (SGD with
momentum).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from tests.equivalence.foreign_models import (
    CASES,
    loss_fn,
    make_batches,
    make_plain_loss,
)

STEPS = 5
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
RANDOM = {"linen_encoder"}
REQUIRED = ("mlp", "gru", "cnn", "linen_encoder")
MORE = tuple(name for name in CASES if name not in REQUIRED)


@dataclasses.dataclass(frozen=True)
class Run:
    """Losses, and the parameters and model state before and after."""

    losses: list[float]
    before: tuple[Any, Any]
    after: tuple[Any, Any]


@functools.cache
def run(name: str, zero: int) -> Run:
    case, batches = CASES[name], make_batches(name, STEPS)
    data, tensor = case.mesh
    engine = jaxpar.initialize(
        model=case.model,
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        sample_batch=batches[0],
        mesh=jaxpar.MeshShape(data=data, tensor=tensor),
        zero=zero,
        accumulate=case.accumulate,
    )
    check_leaves(engine, case.num_params, sharded=zero > 0)
    before = jax.device_get((engine.state.params, engine.state.model_state))
    losses = [float(engine.step(batch)["loss"]) for batch in batches]
    after = jax.device_get((engine.state.params, engine.state.model_state))
    return Run(losses, before, after)


def check_leaves(engine: jaxpar.Engine, num_params: int, *, sharded: bool) -> None:
    params = jax.tree.leaves(engine.state.params)
    assert len(params) == num_params, "a tied parameter is one leaf"
    assert len(jax.tree.leaves(engine.state.opt_state)) == num_params
    assert any(not x.sharding.is_fully_replicated for x in params) == sharded


def run_plainly(name: str) -> Run:
    """One device; micro-batch m is the rows r with r mod accumulate = m."""
    loss_of, parts = make_plain_loss(name), CASES[name].accumulate

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, batch: dict) -> tuple:
        total, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
        for m in range(parts):
            rows = jax.tree.map(lambda x, m=m: x[m::parts], batch)
            (value, state), new = jax.value_and_grad(loss_of, has_aux=True)(
                params, state, rows
            )
            total += value / parts
            grads = jax.tree.map(lambda g, n: g + n / parts, grads, new)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, total

    before = params, state = run(name, 3).before
    opt_state, losses = OPTIMIZER.init(params), []
    for batch in make_batches(name, STEPS):
        params, state, opt_state, loss = step(params, state, opt_state, batch)
        losses.append(float(loss))
    return Run(losses, before, jax.device_get((params, state)))


def check(name: str, stages: tuple[int, ...]) -> None:
    right = run(name, 3) if name in RANDOM else run_plainly(name)
    assert not is_near(right.after[0], right.before[0], 1e-2), "it must have trained"
    for zero in stages:
        found = run(name, zero)
        assert found.losses == pytest.approx(right.losses, rel=1e-5), f"zero={zero}"
        assert_same(found.before, right.before)
        assert is_near(found.after, right.after, 1e-5), f"zero={zero}"


def is_near(tree: Any, other: Any, tolerance: float) -> bool:
    """Relative by leaf; a key's bias has no gradient and stays at rounding size."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    norm = np.linalg.norm
    return all(norm(a - b) <= tolerance * norm(b) + 1e-7 for a, b in pairs)


def assert_same(tree: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("gru", marks=pytest.mark.slow),
        pytest.param("cnn", marks=pytest.mark.slow),
        pytest.param("linen_encoder", marks=pytest.mark.slow),
    ],
)
def test_foreign_model_trains_alike_at_every_stage(name: str) -> None:
    check(name, (0, 1, 2, 3))


@pytest.mark.parametrize("name", MORE)
def test_more_foreign_models_train_like_one_device(name: str) -> None:
    check(name, (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_foreign_models_train_alike_at_the_other_stages(name: str) -> None:
    check(name, (0, 2))
