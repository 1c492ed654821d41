"""Are tiled layers the plain ones, on one device and sharded over many?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models.layers import Linear
from jaxpar.models.mlp import ACTIVATIONS, MLP
from jaxpar.models.tiled import TiledDense, TiledMLP

WIDTH, HIDDEN, ROWS = 16, 48, 8
X = np.random.default_rng(0).normal(size=(ROWS, 6, WIDTH)).astype(np.float32)
GOAL = np.random.default_rng(1).normal(size=(ROWS, 6, WIDTH)).astype(np.float32)


def value_and_grads(layer: nnx.Module) -> tuple[jax.Array, Any]:
    graph, params = nnx.split(layer)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(x)))

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(params, X)
    return value, jax.tree.leaves(grads)


def assert_alike(one: nnx.Module, other: nnx.Module) -> None:
    (value, grads), (right, expected) = map(value_and_grads, (one, other))
    assert float(value) == pytest.approx(float(right), rel=1e-5)
    # Of the input; and the kernels' norms, whose forms differ.
    np.testing.assert_allclose(grads[-1], expected[-1], rtol=1e-4, atol=1e-5)
    norms = [
        sorted(float(jnp.linalg.norm(x)) for x in each) for each in (grads, expected)
    ]
    np.testing.assert_allclose(*norms, rtol=1e-4)


@pytest.mark.parametrize("tiles", [1, 3, 12])
def test_matmul_is_the_plain_one(tiles: int) -> None:
    plain = Linear((WIDTH, HIDDEN), (None, None), rngs=nnx.Rngs(0))
    tiled = TiledDense((WIDTH, HIDDEN), tiles=tiles, rngs=nnx.Rngs(0))
    rebuilt = jnp.moveaxis(tiled.kernel[...], 0, 1).reshape(WIDTH, HIDDEN)
    assert np.array_equal(rebuilt, plain.kernel[...])
    bias = jnp.arange(HIDDEN, dtype=jnp.float32) / HIDDEN
    plain.bias[...] = bias
    tiled.bias[...] = bias.reshape(tiles, -1)
    assert_alike(tiled, plain)


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_is_the_plain_one(activation: str, tiles: int) -> None:
    how = {"activation": activation, "bias": True, "output_stddev": 0.1}
    plain = MLP(WIDTH, HIDDEN, **how, rngs=nnx.Rngs(0))
    tiled = TiledMLP(WIDTH, HIDDEN, tiles=tiles, **how, rngs=nnx.Rngs(0))
    for name in ("gate", "up", "down"):
        layer = getattr(plain, name)
        if layer is not None:
            own = getattr(tiled, f"{name}_bias")
            bias = jnp.arange(layer.bias.size, dtype=jnp.float32) / layer.bias.size
            layer.bias[...] = bias
            own[...] = bias.reshape(own.shape)
    assert_alike(tiled, plain)


def test_without_biases_there_are_none() -> None:
    tiled = TiledMLP(WIDTH, HIDDEN, tiles=4, bias=False, rngs=nnx.Rngs(0))
    assert len(jax.tree.leaves(nnx.state(tiled))) == 2
    dense = TiledDense((WIDTH, HIDDEN), tiles=4, bias=False, rngs=nnx.Rngs(0))
    assert dense(jnp.asarray(X)).shape == (ROWS, 6, HIDDEN)


@pytest.mark.parametrize("tiles", [0, 5])
def test_tiles_must_divide_what_is_cut(tiles: int) -> None:
    with pytest.raises(
        ValueError, match=rf"tiles={tiles} must be .* of the 48 features"
    ):
        TiledMLP(WIDTH, HIDDEN, tiles=tiles, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="divisor of the 48 features"):
        TiledDense((WIDTH, HIDDEN), tiles=tiles, rngs=nnx.Rngs(0))


class Tiled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.into = TiledDense((WIDTH, WIDTH), tiles=4, rngs=rngs)
        self.mlp = TiledMLP(WIDTH, HIDDEN, tiles=4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(jnp.tanh(self.into(x)))


def loss_fn(model: Any, batch: dict) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["goal"]) ** 2)


def trained(model: Any, data: int, **options: Any) -> list[float]:
    batch = {"x": X, "goal": GOAL}
    engine = jaxpar.initialize(
        model=model,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2),
        sample_batch=batch,
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=data), jax.devices()[:data]),
        **options,
    )
    return [float(engine.step(batch)["loss"]) for _ in range(4)]


def blocks() -> jaxpar.PipelineModel:
    return jaxpar.PipelineModel(
        embed=lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        sections=[(Tiled, 2)],
        head=lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    )


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (lambda rngs: Tiled(rngs), {"zero": 3}),
        pytest.param(
            lambda rngs: Tiled(rngs),
            {"zero": 3, "prefetch": True},
            marks=pytest.mark.thorough,
        ),
        (blocks(), {"zero": 3}),
        pytest.param(blocks(), {"zero": 1}, marks=pytest.mark.thorough),
    ],
    ids=["zero3", "prefetch", "blocks-zero3", "blocks-zero1"],
)
def test_sharded_it_trains_as_on_one_device(model: Any, options: dict) -> None:
    np.testing.assert_allclose(
        trained(model, 4, **options), trained(model, 1), rtol=1e-5
    )
