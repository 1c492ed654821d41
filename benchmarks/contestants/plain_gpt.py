"""The step that people write by hand in JAX: ``x_BTD @ w``, scanned, one jit."""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.contestants import protocol

LAYERS, WIDTH, HEADS = protocol.LAYERS, protocol.WIDTH, protocol.HEADS


def make_params(key: jax.Array) -> dict[str, Any]:
    """Draw the parameters, layers stacked."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    blocks = {
        "norm1": jnp.ones((LAYERS, WIDTH)),
        "norm1_bias": jnp.zeros((LAYERS, WIDTH)),
        "norm2": jnp.ones((LAYERS, WIDTH)),
        "norm2_bias": jnp.zeros((LAYERS, WIDTH)),
        "qkv": normal(LAYERS, WIDTH, 3 * WIDTH),
        "qkv_bias": jnp.zeros((LAYERS, 3 * WIDTH)),
        "out": normal(LAYERS, WIDTH, WIDTH),
        "out_bias": jnp.zeros((LAYERS, WIDTH)),
        "up": normal(LAYERS, WIDTH, 4 * WIDTH),
        "up_bias": jnp.zeros((LAYERS, 4 * WIDTH)),
        "down": normal(LAYERS, 4 * WIDTH, WIDTH),
        "down_bias": jnp.zeros((LAYERS, WIDTH)),
    }
    return {
        "embedding": normal(protocol.VOCAB, WIDTH),
        "positions": normal(protocol.LENGTH, WIDTH),
        "blocks": blocks,
        "norm": jnp.ones(WIDTH),
        "norm_bias": jnp.zeros(WIDTH),
    }


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalise the last dim."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def block(x_BTD: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """One layer."""
    B, T, D = x_BTD.shape
    y = layer_norm(x_BTD, w["norm1"], w["norm1_bias"]) @ w["qkv"] + w["qkv_bias"]
    q, k, v = (part.reshape(B, T, HEADS, -1) for part in jnp.split(y, 3, -1))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x_BTD = x_BTD + attended.reshape(B, T, D) @ w["out"] + w["out_bias"]
    y = layer_norm(x_BTD, w["norm2"], w["norm2_bias"])
    y = jax.nn.gelu(y @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]
    return x_BTD + y, None


def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean next-token cross entropy."""
    x = params["embedding"][tokens[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = layer_norm(x, params["norm"], params["norm_bias"]) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main() -> None:
    """Serve steps."""
    jax.config.update("jax_platforms", "cpu")
    optimizer = optax.adamw(protocol.LEARNING_RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = make_params(jax.random.key(0))
    held = [params, optimizer.init(params)]
    batches = [np.array(protocol.tokens(step), np.int32) for step in range(8)]

    def take(number: int) -> float:
        held[0], held[1], loss = step(held[0], held[1], batches[number % 8])
        return float(loss)

    take(0)
    protocol.serve(take)


main()
