"""Does a backward pass that is not linear see the cotangents of one device?

As of kernels that clip or round them (fp8): their size must not depend on the mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
BATCH = {"x": X, "weight": np.linspace(0.1, 1.0, 16, dtype=np.float32)}
LIMIT = 0.01


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x


clipped.defvjp(
    lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -LIMIT, LIMIT),)
)


def totals(out: jax.Array, batch: dict) -> jax.Array:
    return ((out - 1.0) ** 2).mean(-1) * batch["weight"]


def plain(model: Any, batch: dict) -> jax.Array:
    return totals(clipped(model(batch["x"])), batch).mean()


def weighted(model: Any, batch: dict) -> jaxpar.Weighted:
    return jaxpar.Weighted(
        totals(clipped(model(batch["x"])), batch).sum(), batch["weight"].sum()
    )


@pytest.mark.parametrize(("loss", "zero"), [(plain, 0), (weighted, 1), (weighted, 3)])
def test_clipped_cotangents_are_those_of_one_device(loss: Any, zero: int) -> None:
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        loss_fn=loss,
        optimizer=optax.sgd(1.0),
        sample_batch=BATCH,
        zero=zero,
    )
    params: Any = jax.device_get(engine.state.params)

    def right(params: dict, out_of: Any = clipped) -> jax.Array:
        losses = totals(out_of(X @ params["kernel"] + params["bias"]), BATCH)
        return losses.mean() if loss is plain else losses.sum() / BATCH["weight"].sum()

    grads = jax.grad(right)(params)
    free = jax.grad(right)(params, lambda out: out)
    assert not np.allclose(grads["bias"], free["bias"], rtol=0.1), "some are clipped"
    engine.step(BATCH)
    for name, grad in grads.items():
        moved = params[name] - np.asarray(engine.state.params[name])
        np.testing.assert_allclose(moved, grad, rtol=1e-5, atol=1e-6)
