"""Does print(engine) say its model, its mesh, its ZeRO stage and its step?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


def test_engine_prints_what_it_is_and_how_far():
    """Its own count of steps: printing waits for none."""
    engine = jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=lambda model, x: jnp.mean(model(x) ** 2),
        optimizer=optax.sgd(0.1),
        sample_batch=jax.ShapeDtypeStruct((16, 4), jnp.float32),
        mesh=jaxpar.MeshShape(data=4, tensor=2),
        zero=1,
        rules={},
    )
    said = (
        "<jaxpar.Engine: Net, 30 parameters, ZeRO 1 on data 4 x pipe 1 x tensor 2, "
        "float32, accumulate 1, 16 rows a step, at step {}>"
    )
    assert str(engine) == said.format(0)
    engine.step(np.ones((16, 4), np.float32))
    assert repr(engine) == said.format(1)
