"""What is compared on a slow network, and what does it train?

A technique is one line of `TECHNIQUES`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.optim import (
    QuantizedReduction,
    WithReduction,
    diloco,
    onebit_adam,
    zero_one_adam,
)

RATE = 1e-4
WARM_STEPS = 4
"""Steps before anything is timed; a technique compresses when they are done."""


@dataclasses.dataclass(frozen=True)
class Technique:
    """A way to train over a network.

    Attributes:
      arguments: makes the arguments of `jaxpar.initialize` that are its own.
      period: steps after which its communication repeats, such as its local steps; a
        turn is a multiple of them.
    """

    arguments: Callable[[], dict[str, Any]]
    period: int = 1

    def steps(self, wanted: int) -> int:
        """So many steps or a few more, in whole periods."""
        return -(-wanted // self.period) * self.period


def quantized(bits: int) -> dict[str, Any]:
    """Adam, its gradients sent in few bits."""
    reduction = QuantizedReduction(bits=bits)
    return {"optimizer": WithReduction(optax.adamw(RATE), reduction)}


def zero_one(alone: int) -> dict[str, Any]:
    """0/1 Adam, whose workers exchange signs once in so many steps."""
    # A second moment of three steps is too small where gradients were small by chance.
    given = {"local_step_scaler": 1, "local_step_clipper": alone, "eps": 1e-3}
    return {"optimizer": zero_one_adam(RATE, WARM_STEPS - 1, **given)}


def joined(every: int) -> dict[str, Any]:
    """Adam on each host by itself, joined once in so many steps."""
    replicas = jax.process_count()
    return {
        "optimizer": diloco(optax.adamw(RATE), replicas=replicas, every=every),
        "mesh": jaxpar.MeshShape(replica=replicas, data=-1),
    }


PLAIN, ONE_BIT = "plain Adam", "1-bit Adam"
TECHNIQUES = {
    PLAIN: Technique(lambda: {"optimizer": optax.adamw(RATE)}),
    "8-bit gradients": Technique(lambda: quantized(8)),
    "4-bit gradients": Technique(lambda: quantized(4)),
    ONE_BIT: Technique(lambda: {"optimizer": onebit_adam(RATE, WARM_STEPS // 2)}),
    "0/1 Adam, signs every 4 steps": Technique(lambda: zero_one(4), period=4),
    "DiLoCo, joined every 16 steps": Technique(lambda: joined(16), period=16),
}


WHOLE_RUN, RUN_STEPS, RUN_WARM_STEPS = "1-bit Adam, a whole run", 400, 80
RUNS = {WHOLE_RUN: Technique(lambda: {"optimizer": onebit_adam(RATE, RUN_WARM_STEPS)})}
"""Not compared step by step: tests count what such a run sends."""


class Mlp(nnx.Module):
    """Square layers without biases: many bytes to reduce, little to compute."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        sides = width, width
        self.layers = nnx.List(
            nnx.Linear(*sides, use_bias=False, rngs=rngs) for _ in range(layers)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Run it."""
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


def make_engine(name: str, width: int, layers: int, rows: int) -> jaxpar.Engine:
    """An engine of a technique, on all devices of all processes, ZeRO 0."""

    def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    given = {
        "model": lambda rngs: Mlp(width, layers, rngs),
        "loss_fn": loss_fn,
        "sample_batch": make_batch(width, rows),
        "mesh": jaxpar.MeshShape(data=-1),
        "zero": 0,
    }
    return jaxpar.initialize(**given | {**TECHNIQUES, **RUNS}[name].arguments())


def make_batch(width: int, rows: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random rows."""
    x, y = np.random.default_rng(seed).normal(size=(2, rows, width)).astype(np.float32)
    return {"x": x, "y": y}
