"""The README's loop on a model whose step takes longer than its dispatch.

Run as `python tests/endless_loop.py ZERO DEVICES`: no number is ever read.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import jaxpar

ROUNDS = 400


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(32, 2048, rngs=rngs)
        self.out = nnx.Linear(2048, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def loss_fn(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def make(zero: int, devices: int) -> tuple[jaxpar.Engine, dict[str, np.ndarray]]:
    """An engine on so many CPU devices, and a batch."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    batch = {"x": x, "y": np.argmax(x[:, :4], axis=1).astype(np.int32)}
    engine = jaxpar.initialize(
        model=lambda rngs: Classifier(rngs),
        loss_fn=loss_fn,
        optimizer=optax.adamw(3e-3),
        sample_batch=batch,
        zero=zero,
    )
    return engine, batch


def main(zero: int, devices: int) -> None:
    engine, batch = make(zero, devices)
    for _ in range(ROUNDS):
        engine.step(batch)
    losses = [engine.evaluate(batch)["loss"] for _ in range(ROUNDS)]
    print(f"{engine.steps} steps, loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
