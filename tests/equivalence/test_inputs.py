"""Does a loss function get what it asks for, the same on every mesh?

Against plain JAX on the whole batch, at fp32's rounding: parts of a batch that are not
rows, key, step and training by name, and metrics that are sums and maxima.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar

pytestmark = pytest.mark.usefixtures("checked_losses")

ROWS = 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
TARGET = RNG.normal(size=(ROWS, 8)).astype(np.float32)
SCALE = RNG.uniform(0.5, 2.0, size=8).astype(np.float32)
BATCH = {
    "x": X,
    "y": TARGET,
    "scale": jaxpar.Replicated({"scale": SCALE}),
}
MESHES = {
    "data_8": {"mesh": jaxpar.MeshShape(data=8), "zero": 3},
    "data_4_accumulate": {
        "mesh": jaxpar.MeshShape(data=4, tensor=2),
        "zero": 2,
        "accumulate": 2,
    },
    "coupled": {"mesh": jaxpar.MeshShape(data=8), "zero": 1, "coupled_batch": True},
    "pipe": {"mesh": jaxpar.MeshShape(data=2, pipe=2, tensor=2), "accumulate": 4},
}


class Scale(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale


def make_model() -> jaxpar.PipelineModel:
    return jaxpar.PipelineModel(
        embed=lambda rngs: nnx.Linear(4, 8, rngs=rngs),
        sections=[(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 2)],
        head=Scale,
    )


def error_of(out: Any, batch: dict, step: Any) -> Any:
    return (out - batch["y"]) ** 2 * batch["scale"]["scale"] * (1 + 0.5 * step)


def loss_fn(model: Any, batch: dict, *, step: jax.Array, training: bool) -> tuple:
    assert training
    error = error_of(model(batch["x"]), batch, step)
    metrics = {
        "count": jaxpar.Sum((error > 1).sum()),
        "largest": jaxpar.Max(error.max()),
        "smallest": jaxpar.Max(-error.max()),
    }
    return error.mean(), metrics


def eval_fn(model: Any, batch: dict, key: jax.Array, training: bool = True) -> tuple:
    assert not training
    return error_of(model(batch["x"]), batch, 0).mean(), {
        "count": jaxpar.Sum(len(batch["x"]))
    }


def run_plainly(params: dict, steps: int) -> list[dict]:
    """One device, SGD; each step's numbers."""
    plain = {**BATCH, "scale": BATCH["scale"].value}

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params: dict, step: jax.Array) -> tuple:
        hidden = X @ params["embed"]["kernel"] + params["embed"]["bias"]
        for i in range(2):
            kernel, bias = params["blocks"]["kernel"][i], params["blocks"]["bias"][i]
            hidden = hidden @ kernel + bias
        error = error_of(hidden * params["head"]["scale"], plain, step)
        return error.mean(), error

    found, step_of = [], jax.jit(loss)
    for step in range(steps):
        (value, error), grads = step_of(params, step)
        found.append({
            "loss": value,
            "count": (error > 1).sum(),
            "largest": error.max(),
        })  # fmt: skip
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    return [jax.tree.map(float, numbers) for numbers in found]


@pytest.mark.parametrize("case", MESHES)
def test_parts_that_are_not_rows_and_names_are_given_on_every_mesh(case: str) -> None:
    engine = jaxpar.initialize(
        model=make_model(),
        loss_fn=loss_fn,
        eval_fn=eval_fn,
        optimizer=optax.sgd(0.05),
        sample_batch=BATCH,
        **MESHES[case],
    )
    right = run_plainly(jax.device_get(engine.state.params), 3)
    first = engine.evaluate(BATCH)
    assert float(first["loss"]) == pytest.approx(right[0]["loss"], rel=1e-5)
    assert float(first["count"]) == ROWS
    for expected in right:
        found = engine.step(BATCH)
        assert float(found["loss"]) == pytest.approx(expected["loss"], rel=1e-5)
        assert float(found["largest"]) == pytest.approx(expected["largest"], rel=1e-4)
        assert float(found["count"]) == expected["count"]
        assert float(found["smallest"]) < 0, "what is no example's has no part"


def test_a_linen_model_is_initialised_with_what_the_loss_takes() -> None:
    def noisy(model: Any, batch: dict, key: jax.Array, step: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, ()) * (step + 1)
        return jnp.mean((model(batch["x"]) - noise) ** 2)

    engine = jaxpar.initialize(
        model=nn.Dense(3),
        loss_fn=noisy,
        optimizer=optax.sgd(0.0),
        sample_batch={"x": X},
    )
    losses = {float(engine.step({"x": X})["loss"]) for _ in range(3)}
    assert len(losses) == 3


@dataclasses.dataclass(frozen=True)
class Scored:
    """A loss that is an object."""

    factor: float

    def __call__(self, model: Any, batch: dict, *, training: bool) -> jax.Array:
        return jnp.mean(model(batch["x"]) ** 2) * self.factor * training


def test_a_callable_object_is_a_loss() -> None:
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss_fn=Scored(2.0),
        optimizer=optax.sgd(0.0),
        sample_batch={"x": X},
    )
    assert float(engine.step({"x": X})["loss"]) > 0
    assert float(engine.evaluate({"x": X})["loss"]) == 0


def test_other_values_of_what_is_not_rows_are_taken_and_other_shapes_refused() -> None:
    batch = {"x": X, "scale": jaxpar.Replicated(SCALE[:1])}
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch["x"]) ** 2 * batch["scale"]),
        optimizer=optax.sgd(0.0),
        sample_batch=batch,
        accumulate=2,
    )
    one = float(engine.step(batch)["loss"])
    double = {"x": X, "scale": jaxpar.Replicated(2 * SCALE[:1])}
    assert float(engine.step(double)["loss"]) == pytest.approx(2 * one, rel=1e-6)
    wrong = {"x": X, "scale": jaxpar.Replicated(SCALE)}
    with pytest.raises(ValueError, match=r"leaf scale/value is float32\[8\], but must"):
        engine.step(wrong)


def test_number_in_a_replicated_part_may_be_pythons() -> None:
    batch = {"x": X, "scale": jaxpar.Replicated(0.5)}
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch["x"]) ** 2) * batch["scale"],
        optimizer=optax.sgd(0.0),
        sample_batch=batch,
    )
    one = float(engine.step(batch)["loss"])
    double = engine.step({"x": X, "scale": jaxpar.Replicated(1.0)})["loss"]
    assert float(double) == pytest.approx(2 * one, rel=1e-6)


@pytest.mark.parametrize("bound", [True, False])
def test_name_that_a_partial_has_bound_keeps_its_value(bound: bool) -> None:
    def loss(model: Any, batch: jax.Array, training: bool = True) -> jax.Array:
        return model(batch).mean() * 0 + (2.0 if training else 1.0)

    loss_fn = functools.partial(loss, training=False) if bound else loss
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.0),
        sample_batch=X,
    )
    assert float(engine.step(X)["loss"]) == (1.0 if bound else 2.0)
