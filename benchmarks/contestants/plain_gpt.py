"""The step that people write by hand in JAX: ``x_BTD @ w``, one jit. SHAPE is given.

On a CPU it scans over layers. On a GPU the scan is unrolled, attention is cuDNN's, and
the products are in bf16, of a copy of the parameters that is made once a step.
"""

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

SHAPE = protocol.SHAPES[sys.argv[1]]
ON_GPU = SHAPE.device == "gpu"
LAYERS, WIDTH, HEADS = SHAPE.layers, SHAPE.width, SHAPE.heads


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
        "embedding": normal(SHAPE.vocab, WIDTH),
        "positions": normal(SHAPE.length, WIDTH),
        "blocks": blocks,
        "norm": jnp.ones(WIDTH),
        "norm_bias": jnp.zeros(WIDTH),
    }


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalise the last dim, in fp32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    y = (wide - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias
    return y.astype(x.dtype)


def block(x_BTD: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """One layer."""
    B, T, D = x_BTD.shape
    y = layer_norm(x_BTD, w["norm1"], w["norm1_bias"]) @ w["qkv"] + w["qkv_bias"]
    q, k, v = (part.reshape(B, T, HEADS, -1) for part in jnp.split(y, 3, -1))
    attended = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn" if ON_GPU else None
    )
    x_BTD = x_BTD + attended.reshape(B, T, D) @ w["out"] + w["out_bias"]
    y = layer_norm(x_BTD, w["norm2"], w["norm2_bias"])
    y = jax.nn.gelu(y @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]
    return x_BTD + y, None


def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean next-token cross entropy."""
    if ON_GPU:
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = params["embedding"][tokens[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(block, x, params["blocks"], unroll=LAYERS if ON_GPU else 1)
    x = layer_norm(x, params["norm"], params["norm_bias"])
    logits = (x @ params["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main() -> None:
    """Serve steps."""
    if not ON_GPU:
        jax.config.update("jax_platforms", "cpu")
    optimizer = optax.adamw(protocol.LEARNING_RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = make_params(jax.random.key(0))
    held = [params, optimizer.init(params)]
    batches = [np.array(protocol.tokens(SHAPE, step), np.int32) for step in range(8)]

    def take(number: int) -> jax.Array:
        held[0], held[1], loss = step(held[0], held[1], batches[number % 8])
        return loss

    def report() -> dict[str, int]:
        measured = jax.devices()[0].memory_stats()
        return {"peak_bytes": measured["peak_bytes_in_use"]} if measured else {}

    float(take(0))
    protocol.serve(take, report)


main()
