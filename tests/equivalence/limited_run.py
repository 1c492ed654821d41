"""A run whose state is larger than a memory limit: OFFLOAD (disk or host) and FOLDER.

It prints the state's bytes, then the losses.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar

LAYERS, WIDTH, STEPS = 16, 4096, 3
STATE_BYTES = 12 * LAYERS * WIDTH**2


class Net(nnx.Module):
    """Residual layers, each a leaf of its own."""

    def __init__(self, rngs: nnx.Rngs):
        make = lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)  # noqa: E731
        self.layers = nnx.List([make() for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def loss_fn(model: Any, batch: dict) -> jax.Array:
    made = model(batch["x"].astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.mean((made - batch["x"]) ** 2)


def main() -> None:
    on_disk = sys.argv[1] == "disk"
    options = {"optimizer": "disk", "path": sys.argv[2]} if on_disk else {}
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(8, WIDTH)).astype(np.float32)} for _ in range(STEPS)
    ]
    engine = jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-3),
        sample_batch=batches[0],
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1]),
        precision="bf16",
        zero=3,
        offload=jaxpar.Offload(**options or {"update": "host"}),
    )
    for batch in batches:
        print("loss", float(engine.step(batch)["loss"]).hex(), flush=True)


if __name__ == "__main__":
    main()
