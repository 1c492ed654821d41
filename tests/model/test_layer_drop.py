"""Is a block kept as often as is scheduled, and is what it adds divided by that?"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.jaxprs.evaluate import equations
from jaxpar.model.layer_drop import LayerDrop

BLOCKS, WIDTH, STEPS = 4, 8, 60
DROP = LayerDrop(theta=0.4, gamma=0.1)


class Ends(nnx.Module):
    """An embedding, or a head, that passes its input on."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight[...]


class Adds(nnx.Module):
    """A block that adds its weight to every row."""

    def __init__(self, rngs: nnx.Rngs):
        self.weight = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.weight[...]


MODEL = jaxpar.PipelineModel(
    embed=Ends, sections=[(Adds, BLOCKS)], head=Ends, layer_drop=DROP
)


def engine(
    model: jaxpar.PipelineModel = MODEL, zero: int = 0, data: int = 1
) -> jaxpar.Engine:
    def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return model(batch["x"]).mean()

    return jaxpar.initialize(
        model=model,
        loss_fn=loss_fn,
        optimizer=optax.sgd(1.0),
        sample_batch=BATCH,
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=data), jax.devices()[:data]),
        zero=zero,
        trainable=["blocks*"],
    )


BATCH = {"x": np.ones((4, WIDTH), np.float32)}


def test_a_step_keeps_blocks_by_the_schedule_and_scales_what_they_add() -> None:
    """The gradient of a block's weight is 0, or that of the whole model over p."""
    own = engine()
    kept = np.zeros((STEPS, BLOCKS), bool)
    expected = np.zeros((STEPS, BLOCKS))
    before = np.asarray(own.state.params["blocks"]["weight"])
    for step in range(STEPS):
        last = 0.6 * np.exp(-0.1 * step) + 0.4
        share = 1 - np.arange(1, BLOCKS + 1) / BLOCKS * (1 - last)
        own.step(BATCH)
        after = np.asarray(own.state.params["blocks"]["weight"])
        moved = (before - after).mean(1) * WIDTH
        kept[step], expected[step], before = moved > 0.5, share, after
        np.testing.assert_allclose(moved, kept[step] / share, rtol=1e-4, atol=1e-5)
    assert kept[0].all(), "p is 1 at the first step"
    deviation = np.sqrt((expected * (1 - expected)).sum(0))
    assert (np.abs(kept.sum(0) - expected.sum(0)) < 3 * deviation).all()
    assert not kept[:, -1].all()


class Counts(Adds):
    """A block that counts its calls in training."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return super().__call__(x)


@pytest.mark.parametrize("zero", [0, 3])
def test_blocks_left_out_keep_their_state_and_no_conditional_is_left(zero) -> None:
    sections = [(Counts, BLOCKS)]
    own = engine(dataclasses.replace(MODEL, sections=sections), zero=zero, data=2)
    assert own.spec.coupled or zero == 0
    traced = own.traces()["step"].jaxpr
    names = {eqn.primitive.name for eqn in equations(traced.jaxpr)}
    assert {"while", "cond"} & names == {"while"}
    kept = np.zeros(BLOCKS)
    for _ in range(12):
        before = np.asarray(own.state.params["blocks"]["weight"])
        own.step(BATCH)
        kept += (before != np.asarray(own.state.params["blocks"]["weight"])).any(1)
        calls = own.state.model_state["blocks"]["calls"]
        np.testing.assert_array_equal(calls, kept)
    assert 0 < kept[-1] < 12


def test_an_evaluation_has_all_blocks() -> None:
    own = engine()
    for _ in range(20):
        own.step(BATCH)
    weight = np.asarray(own.state.params["blocks"]["weight"])
    found = float(own.evaluate(BATCH)["loss"])
    assert found == pytest.approx(1 + weight.sum(0).mean(), rel=1e-5)


def test_mean_share_over_the_schedule_of_the_paper() -> None:
    """Its steps take 24 % less time; these are layers alone, without the rest."""
    drop = LayerDrop(theta=0.5, gamma=0.001)
    shares = [float(drop.mean_share(t, 12)) for t in range(0, 100_000, 500)]
    assert shares[0] == 1
    assert shares[-1] == pytest.approx(1 - 13 / 24 * 0.5)
    assert np.mean(shares) == pytest.approx(0.7326, abs=1e-4)


@pytest.mark.parametrize("theta", [0.0, -0.5, 1.01])
def test_share_in_the_end_is_one(theta: float) -> None:
    with pytest.raises(ValueError, match=f"theta={theta} must be above 0"):
        LayerDrop(theta=theta)


def test_rate_is_not_negative() -> None:
    for gamma in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"gamma={gamma} must be a number"):
            LayerDrop(gamma=gamma)
