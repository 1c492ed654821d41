"""A small model whose every parameter has a true gradient, and its plain loop.

For optimizers: one kernel is split over tensor by rule, one is not, biases stay whole.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar

STEPS, ROWS = 6, 32


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.2)
        split = nnx.with_partitioning(normal, (None, "mlp"))
        self.up = nnx.Linear(16, 64, kernel_init=split, bias_init=normal, rngs=rngs)
        self.out = nnx.Linear(64, 8, kernel_init=normal, bias_init=normal, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.up(x)))


def loss_fn(model: Any, batch: dict) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@functools.cache
def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)

    def rows(width: int) -> np.ndarray:
        return rng.normal(size=(ROWS, width)).astype(np.float32)

    return [{"x": rows(16), "y": rows(8)} for _ in range(STEPS)]


def make_engine(
    optimizer: Any, data: int, tensor: int, zero: int, **options: Any
) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(data=data, tensor=tensor)
    return jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=optimizer,
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()[: data * tensor]),
        zero=zero,
        rules={"mlp": "tensor"},
        **options,
    )


@functools.cache
def first_params() -> dict:
    return jax.device_get(make_engine(optax.sgd(0.0), 1, 1, zero=0).state.params)


WIDTH, BLOCKS = 16, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.up = nnx.Linear(WIDTH, WIDTH, kernel_init=normal, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.up(x))


def make_piped_engine(optimizer: Any, **options: Any) -> jaxpar.Engine:
    """Residual blocks on two stages."""
    return jaxpar.initialize(
        model=jaxpar.PipelineModel(
            embed=lambda rngs: nnx.Linear(16, WIDTH, rngs=rngs),
            sections=[(lambda rngs: Block(rngs), BLOCKS)],
            head=lambda rngs: nnx.Linear(WIDTH, 8, rngs=rngs),
        ),
        loss_fn=loss_fn,
        optimizer=optimizer,
        sample_batch=batches()[0],
        **{
            "mesh": jaxpar.MeshShape(data=4, pipe=2),
            "zero": 1,
            "accumulate": 4,
            **options,
        },
    )


def blocks_of(params: dict, x: jax.Array) -> jax.Array:
    """The model of `make_piped_engine`, of its parameters alone."""
    x = x @ params["embed"]["kernel"] + params["embed"]["bias"]
    for layer in range(BLOCKS):
        own = jax.tree.map(
            lambda leaf, layer=layer: leaf[layer], params["blocks"]["up"]
        )
        x = x + jnp.tanh(x @ own["kernel"] + own["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"]


def run_blocks_plainly(
    optimizer: optax.GradientTransformation, params: dict, batches: list[dict]
) -> tuple[list[float], dict]:
    """Losses and parameters of a plain loop of that model on one device."""

    @jax.jit
    def step(params: dict, state: optax.OptState, batch: dict) -> tuple:
        def loss_of(params: dict) -> jax.Array:
            return loss_fn(lambda x: blocks_of(params, x), batch)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def loss_of(params: dict, batch: dict) -> jax.Array:
    """The loss of the parameters alone."""
    up, out = params["up"], params["out"]
    hidden = jnp.tanh(batch["x"] @ up["kernel"] + up["bias"])
    made = hidden @ out["kernel"] + out["bias"]
    return jnp.mean((made - batch["y"]) ** 2)


def run_plainly(
    optimizer: optax.GradientTransformation, *, takes_value: bool
) -> tuple[list[float], dict]:
    """Losses and parameters of a plain loop on one device."""

    @jax.jit
    def step(params: dict, state: optax.OptState, batch: dict) -> tuple:
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        named = {"value": value} if takes_value else {}
        updates, state = optimizer.update(grads, state, params, **named)
        return optax.apply_updates(params, updates), state, value

    params, losses = first_params(), []
    state = optimizer.init(params)
    for batch in batches():
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, jax.device_get(params)
