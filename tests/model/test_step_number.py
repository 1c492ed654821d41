"""Do modules see the number of the step: NNX and Linen, stacked, in a pipeline?"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.model.step_number import filled, is_context

WIDTH = 4
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
MESH = jaxpar.MeshShape(data=2)


class Seeing(nnx.Module):
    """Returns the number that it sees, with a gradient."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.step = jaxpar.Step(jnp.int32(0))

    def __call__(self, x):
        return x + 0 * self.linear(x) + self.step[...]


class Stacked(nnx.Module):
    """Three of them, made by vmap and run by scan."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> Seeing:
            return Seeing(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        return nnx.scan(lambda x, block: block(x), **axes)(x, self.blocks)


class LinenSeeing(nn.Module):
    @nn.compact
    def __call__(self, x):
        step: Any = self.variable("context", "step", lambda: jnp.int32(0))
        return x + 0 * nn.Dense(WIDTH)(x) + step.value


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return LinenSeeing()(x), None


class LinenStacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "context": 0}
        run = nn.scan(LinenBlock, axes, split_rngs={"params": True}, length=3)
        return run()(x, None)[0]


class Nothing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x):
        return x * self.scale


def make_parts(block: Any) -> jaxpar.PipelineModel:
    return jaxpar.PipelineModel(embed=Nothing, sections=[(block, 4)], head=Nothing)


# The model, and how many times it adds the number.
MODELS: dict[str, tuple[Any, int]] = {
    "nnx": (Seeing, 1),
    "nnx stacked": (Stacked, 3),
    "linen": (LinenSeeing(), 1),
    "linen stacked": (LinenStacked(), 3),
    "parts": (make_parts(Seeing), 4),
    "linen parts": (make_parts(LinenSeeing()), 4),
    "parts at the ends": (
        jaxpar.PipelineModel(embed=Seeing, sections=[(Nothing, 4)], head=Seeing),
        2,
    ),
}


def cases(names: list[str], quick: list[str]) -> list[Any]:
    marks = pytest.mark.thorough
    return [n if n in quick else pytest.param(n, marks=marks) for n in names]


ALONE = cases(list(MODELS), ["nnx", "nnx stacked", "linen"])
PIPED = cases(["parts", "linen parts", "parts at the ends"], ["parts"])


def loss_fn(model, batch, step):
    mean = (model(batch) - batch).mean()
    return mean, {"seen": mean, "step": step.astype(jnp.float32)}


def make_engine(model: Any, mesh: jaxpar.MeshShape = MESH, **change: Any):
    right = {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": optax.set_to_zero(),
        "sample_batch": X,
        "mesh": mesh,
        "zero": 2,
        "accumulate": 2,
        "check_loss": False,
    }
    return jaxpar.initialize(**(right | change))


def check(engine: jaxpar.Engine, times: int) -> None:
    assert not engine.spec.coupled, "the number is not state of the model"
    for number in range(3):
        metrics = engine.step(X)
        assert float(metrics["step"]) == number
        assert float(metrics["seen"]) == pytest.approx(times * number, abs=1e-5)
    seen = float(engine.evaluate(X)["seen"])
    assert seen == pytest.approx(3 * times, abs=1e-5)
    whole = (engine.model()(X) - X).mean()
    assert float(whole) == pytest.approx(3 * times, abs=1e-5)


@pytest.mark.parametrize("name", ALONE)
def test_modules_see_the_step_that_the_loss_function_sees(name):
    model, times = MODELS[name]
    check(make_engine(model), times)


@pytest.mark.parametrize("name", PIPED)
def test_pipelined_blocks_see_the_step(name):
    model, times = MODELS[name]
    check(make_engine(model, jaxpar.MeshShape(data=2, pipe=2)), times)


def test_number_is_in_no_leaf_of_the_state():
    for model, _ in (MODELS["nnx"], MODELS["linen"]):
        state = make_engine(model).state
        assert jax.tree.leaves(state.model_state) == []
        assert "step" not in state.params


def test_collection_of_the_users_own_stays_state():
    assert is_context({"block": {"step": 0}, "step": 1})
    assert not is_context({"step": 0, "rate": 1.0})
    assert not is_context({})


def test_number_takes_the_variables_shape_and_dtype():
    number = filled(jax.ShapeDtypeStruct((3,), jnp.float32), jnp.int32(7))
    np.testing.assert_array_equal(number, np.full(3, 7, np.float32))
    assert filled(jnp.int32(3), None).dtype == jnp.int32
