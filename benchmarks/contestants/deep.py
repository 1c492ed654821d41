"""A transformer of equal layers in plain NNX, in a loop or scanned, to its first step.

LAYERS, "loop" or "scan", "jaxpar" or "plain", DEVICES and ZERO as arguments; prints the
seconds of initialising and of the first step as JSON, with those of the CPU. It is the
same model, batch and optimizer for both; plain NNX is on one device.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jaxpar

WIDTH, HEADS, LENGTH, VOCAB = 256, 4, 128, 512


class Block(nnx.Module):
    """Attention and an MLP: six parameters."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norms = nnx.List(
            [nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)]
        )
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Update the residual stream."""
        shape = (*x_BTD.shape[:2], 3 * HEADS, WIDTH // HEADS)
        qkv = jnp.split(self.qkv(self.norms[0](x_BTD)).reshape(shape), 3, axis=2)
        mixed_BTNH = jax.nn.dot_product_attention(*qkv, is_causal=True)
        x_BTD = x_BTD + self.out(mixed_BTNH.reshape(x_BTD.shape))
        hidden_BTF = jax.nn.gelu(self.up(self.norms[1](x_BTD)))
        return x_BTD + self.down(hidden_BTF)


class Deep(nnx.Module):
    """Embedding, blocks, head."""

    def __init__(self, layers: int, *, scanned: bool, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        if scanned:
            stacked = nnx.split_rngs(splits=layers)(
                nnx.vmap(lambda rngs: Block(rngs=rngs), in_axes=0, out_axes=0)
            )
            self.blocks: Any = stacked(rngs)
        else:
            self.blocks = nnx.List([Block(rngs=rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.scanned = scanned

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Logits."""
        positions_T = jnp.arange(tokens_BT.shape[1])
        x_BTD = self.embed(tokens_BT) + self.positions(positions_T)
        if self.scanned:
            run = nnx.scan(
                lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            x_BTD = run(x_BTD, self.blocks)
        else:
            for block in self.blocks:
                x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def mean_loss(model: Deep, batch: dict[str, Any]) -> jax.Array:
    """Mean cross-entropy of the next token."""
    tokens_BT = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(model(tokens_BT[:, :-1]), tokens_BT[:, 1:]).mean()


def start_plain(make: Callable[..., Deep], batch: Any) -> Callable[[], float]:
    """Initialise with NNX alone; returns what takes a step."""
    model = make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Deep, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(mean_loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    jax.block_until_ready(nnx.state((model, optimizer)))
    return lambda: float(step(model, optimizer, batch))


def start_jaxpar(
    make: Callable[..., Deep], batch: Any, zero: int
) -> Callable[[], float]:
    """Initialise an engine on all devices; returns what takes a step."""
    engine = jaxpar.initialize(
        model=make,
        loss_fn=mean_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch=batch,
        zero=zero,
    )
    jax.block_until_ready(engine.state)
    return lambda: float(engine.step(batch)["loss"])


def main() -> None:
    """Measure one process."""
    layers, form, who, devices, zero = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.devices()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (2 * int(devices), LENGTH + 1), np.int32)
    batch = {"tokens": tokens}

    def make(rngs: nnx.Rngs) -> Deep:
        return Deep(int(layers), scanned=form == "scan", rngs=rngs)

    def now() -> np.ndarray:
        return np.array([time.perf_counter(), sum(os.times()[:2])])

    began = now()
    plain = who == "plain"
    step = start_plain(make, batch) if plain else start_jaxpar(make, batch, int(zero))
    made = now()
    step()
    print(json.dumps([*(made - began), *(now() - made)]))


if __name__ == "__main__":
    main()
