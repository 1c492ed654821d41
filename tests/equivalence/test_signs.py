"""Where do rules of signs differ between meshes: in leaves without a true gradient.

The bias of an attention's keys changes no weight: all scores of a query move alike. Its
gradient is rounding, and a rule of signs makes full steps of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.optim import fused_lion

ROWS, LENGTH, WIDTH, STEPS, RATE = 32, 12, 32, 6, 1e-3


class Pooling(nnx.Module):
    """The mean of a sequence, weighted by its keys."""

    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.query = nnx.Param(normal(rngs.params(), (WIDTH,)))
        self.key = nnx.Param(normal(rngs.params(), (WIDTH, WIDTH)))
        self.key_bias = nnx.Param(jnp.zeros(WIDTH))
        self.out = nnx.Param(normal(rngs.params(), (WIDTH, 8)))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        names = ("query", "key", "key_bias", "out")
        return pool({name: getattr(self, name)[...] for name in names}, x_BTD)


def pool(params: dict, x_BTD: jax.Array) -> jax.Array:
    keys_BTD = x_BTD @ params["key"] + params["key_bias"]
    weights_BT = jax.nn.softmax(keys_BTD @ params["query"])
    return jnp.einsum("bt,btd->bd", weights_BT, x_BTD) @ params["out"]


def distance(made: jax.Array, batch: dict) -> jax.Array:
    return jnp.mean((made - batch["y"]) ** 2)


def make_batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(ROWS, *shape)).astype(np.float32)

    return [{"x": normal(LENGTH, WIDTH), "y": normal(8)} for _ in range(STEPS)]


def run_plainly(optimizer: optax.GradientTransformation, params: dict) -> dict:
    @jax.jit
    def step(params: dict, state: Any, batch: dict) -> tuple[dict, Any]:
        def loss_of(params: dict) -> jax.Array:
            return distance(pool(params, batch["x"]), batch)

        grads = jax.grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for batch in make_batches():
        params, state = step(params, state, batch)
    return jax.device_get(params)


@pytest.mark.parametrize(
    "optimizer",
    [
        fused_lion(RATE, weight_decay=0.0),
        pytest.param(optax.sign_sgd(RATE), marks=pytest.mark.slow),
        pytest.param(optax.lion(RATE, weight_decay=0.0), marks=pytest.mark.slow),
    ],
    ids=["fused_lion", "sign_sgd", "lion"],
)
def test_only_leaves_without_a_true_gradient_differ(optimizer) -> None:
    engine = jaxpar.initialize(
        model=lambda rngs: Pooling(rngs),
        loss_fn=lambda model, batch: distance(model(batch["x"]), batch),
        optimizer=optimizer,
        sample_batch=make_batches()[0],
        mesh=jaxpar.MeshShape(data=8),
        zero=3,
    )
    first = jax.device_get(engine.state.params)
    for batch in make_batches():
        engine.step(batch)
    found = jax.device_get(engine.state.params)
    expected = run_plainly(getattr(optimizer, "equal", optimizer), first)
    bias, right = found.pop("key_bias"), expected.pop("key_bias")
    for name, x in expected.items():
        assert np.abs(x - first[name]).max() > 3 * RATE, name
        np.testing.assert_allclose(found[name], x, atol=1e-6, err_msg=name)
    differs = np.abs(bias - right)
    assert RATE <= differs.max() <= 2 * STEPS * RATE * (1 + 1e-3)
