"""Are averaged and schedule-free weights evaluated, exported and trained on?

Against optax and the loss function on one device, at fp32's rounding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.optim import fused_adamw

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
SCHEDULE_FREE = optax.contrib.schedule_free_adamw(0.3, b1=0.9)


def loss_fn(model: Any, batch: dict) -> jax.Array:
    return jnp.mean((model(batch["x"]) - 1.0) ** 2)


def make_engine(optimizer: Any) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        loss_fn=loss_fn,
        optimizer=optimizer,
        sample_batch=BATCH,
        mesh=jaxpar.MeshShape(data=4, tensor=2),
        zero=3,
    )


@functools.cache
def plain() -> Any:
    """The loss of parameters on one device."""

    @jax.jit
    def loss(params: dict) -> jax.Array:
        out = BATCH["x"] @ params["kernel"] + params["bias"]
        return jnp.mean((out - 1.0) ** 2)

    return loss


def whole(params: dict) -> dict:
    return jax.device_get(params)


def test_schedule_free_weights_are_evaluated_and_exported() -> None:
    engine = make_engine(SCHEDULE_FREE)
    for _ in range(10):
        engine.step(BATCH)
    state = engine.state
    averaged = optax.contrib.schedule_free_eval_params(state.opt_state, state.params)
    found = float(engine.evaluate(BATCH, params=averaged)["loss"])
    assert found == pytest.approx(float(plain()(whole(averaged))), rel=1e-6)
    trained = float(engine.evaluate(BATCH)["loss"])
    assert trained == pytest.approx(float(plain()(whole(state.params))), rel=1e-6)
    assert abs(found - trained) > 1e-3 * trained, "the average is another model"
    exported = engine.model(params=averaged)
    np.testing.assert_array_equal(exported.kernel[...], whole(averaged)["kernel"])
    engine.step(BATCH)


@pytest.mark.parametrize("kind", ["optax", "fused"])
def test_loaded_params_are_trained_on(kind: str) -> None:
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    given = {"optax": optimizer, "fused": fused_adamw(1e-2, weight_decay=0.1)}[kind]
    engine = make_engine(given)
    start = {"kernel": np.full((4, 8), 0.5), "bias": np.ones(8, np.float16)}
    engine.load_params(start)
    params: Any = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
    state = optimizer.init(params)
    for _ in range(3):
        loss, grads = jax.value_and_grad(plain())(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert float(engine.step(BATCH)["loss"]) == pytest.approx(float(loss), rel=1e-6)
    for name, leaf in engine.state.params.items():
        np.testing.assert_allclose(leaf, params[name], rtol=1e-5)
    assert engine.evaluate(BATCH, params=start)["loss"] == pytest.approx(
        float(plain()(jax.tree.map(jnp.float32, start))), rel=1e-6
    )


def test_state_of_an_nnx_model_is_taken() -> None:
    engine = make_engine(optax.sgd(0.1))
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(7))
    given = nnx.state(model, nnx.Param)
    right = float(loss_fn(model, BATCH))
    found = engine.evaluate(BATCH, params=given)["loss"]
    assert float(found) == pytest.approx(right, rel=1e-6)
    engine.load_params(given)
    assert float(engine.evaluate(BATCH)["loss"]) == pytest.approx(right, rel=1e-6)
