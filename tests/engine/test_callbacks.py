"""Is a loss function that calls the host refused where JAX can't, and run elsewhere?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar

BATCH = {"x": np.ones((16, 4), np.float32)}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - 1.0) ** 2)


def printed(model, batch):
    value = loss(model, batch)
    jax.debug.print("the loss is {}", value)
    return value


def make_engine(**change):
    given = {"loss_fn": loss, "mesh": jaxpar.MeshShape(data=4, tensor=2)}
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 6, rngs=rngs),
        optimizer=optax.sgd(0.1),
        sample_batch=BATCH,
        **(given | change),
    )


@pytest.mark.parametrize("argument", ["loss_fn", "eval_fn"])
def test_print_is_refused_before_anything_compiles(argument, compiled):
    message = (
        rf"{argument}: debug_\w+ at .*printed.*: JAX can't call the host .* as a "
        "metric, or pass coupled_batch=True"
    )
    with pytest.raises(ValueError, match=message):
        make_engine(**{argument: printed})
    assert compiled == []


def test_coupled_loss_may_print(capfd):
    value = make_engine(loss_fn=printed, coupled_batch=True).step(BATCH)["loss"]
    jax.effects_barrier()
    assert f"the loss is {float(value):.5f}"[:-1] in capfd.readouterr().out
