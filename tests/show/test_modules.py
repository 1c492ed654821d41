"""Does the table of an engine show its modules?"""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import jaxpar
from jaxpar.show.modules import table


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def test_table_has_parameters_and_flops_of_a_step():
    engine = jaxpar.initialize(
        model=Net,
        loss_fn=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optax.sgd(0.1),
        sample_batch={"x": jax.ShapeDtypeStruct((16, 4), np.float32)},
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1]),
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(table(engine))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    # The input has no gradient: two matmuls of the first layer, three of the other.
    assert ["up", "40", "2.05", "k"] in [line[:4] for line in lines]
    assert ["down", "36", "3.07", "k"] in [line[:4] for line in lines]
