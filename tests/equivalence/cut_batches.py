"""Batches of several lengths and numbers of rows, and the plain loop over them.

The oracle shares nothing with the engine but the model's own code: one device, each
batch as it is, `jax.value_and_grad`, optax.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder

CONFIG = DecoderConfig(
    vocab_size=32,
    seq_len=16,
    num_layers=2,
    num_heads=4,
    width=16,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
)
SHAPES = (8, 8), (8, 16), (16, 16)
"""Rows and targets of the batches, shorter ones first; the last is the sample's."""
OPTIMIZER = optax.adamw(1e-3, eps=1e-6)


def batch_of(rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 32, (rows, length + 1), np.int32),
        "weights": rng.random((rows, length)).astype(np.float32),
    }


@functools.cache
def batches(steps: int = 6) -> tuple[dict[str, np.ndarray], ...]:
    """As many steps of each of the shapes, one shape after the other."""
    each = -(-steps // len(SHAPES))
    return tuple(batch_of(*SHAPES[step // each], step) for step in range(steps))


def make_engine(
    sizes: dict[str, int], shapes: Sequence[tuple[int, int]] = SHAPES, **given: Any
) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(**{"data": 1, **sizes})
    return jaxpar.initialize(
        **{
            "model": make_decoder(CONFIG),
            "loss_fn": decoder_loss,
            "optimizer": OPTIMIZER,
            "sample_batch": batch_of(*shapes[-1]),
            "other_shapes": [batch_of(*each) for each in shapes[:-1]],
            "mesh": jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
            "clip_norm": 1.0,
            **given,
        }
    )


@functools.cache
def trained_plainly() -> tuple[list[float], Any]:
    """The losses over `batches`, and the parameters after them."""
    return plainly(batches())


def plainly(batches: Sequence[dict[str, np.ndarray]]) -> tuple[list[float], Any]:
    """The losses of a plain loop, and the parameters after it."""
    engine = make_engine({}, SHAPES[-1:])
    whole, first = engine.model(), jax.device_get(engine.state.params)

    def loss_of(params: Any, batch: dict) -> jax.Array:
        found = decoder_loss(whole.with_params(params), batch)
        return found.total / found.weight

    @jax.jit
    def step(params: Any, state: Any, batch: dict) -> tuple:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        factor = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
        grads = jax.tree.map(lambda g: g * factor, grads)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state, losses = first, OPTIMIZER.init(first), []
    for batch in batches:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)
