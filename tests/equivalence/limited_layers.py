"""A run of more parameters than a memory limit: OFFLOAD (disk or host) and FOLDER.

It prints the losses.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar

LAYERS, MATRICES, WIDTH, STEPS = 40, 16, 1024, 3
PARAM_BYTES = 4 * LAYERS * MATRICES * WIDTH**2


class Net(nnx.Module):
    """A loop over residual layers of several matrices."""

    def __init__(self, rngs: nnx.Rngs):
        shape, size = (LAYERS, WIDTH, WIDTH), WIDTH**-0.5

        def stack() -> nnx.Param:
            draw = jax.random.uniform(rngs.params(), shape, minval=-1.0)
            return nnx.Param(size * draw)

        self.stacks = nnx.List([stack() for _ in range(MATRICES)])

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, matrices: list) -> tuple[jax.Array, None]:
            for matrix in matrices:
                x = x + jnp.tanh(x @ matrix)
            return x, None

        return jax.lax.scan(layer, x, [stack[...] for stack in self.stacks])[0]


def loss_fn(model: Any, batch: dict) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


def main() -> None:
    host = jaxpar.Offload(update="host", params="host")
    disk = jaxpar.Offload(optimizer="disk", params="disk", path=sys.argv[2])
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
        zero=3,
        offload=disk if sys.argv[1] == "disk" else host,
    )
    for batch in batches:
        print("loss", float(engine.step(batch)["loss"]).hex(), flush=True)


if __name__ == "__main__":
    main()
