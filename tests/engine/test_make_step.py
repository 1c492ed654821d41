"""What does a loss's step know?"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.make_step import make_step
from jaxpar.engine.read_arguments import read_loss
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.bridge import make_network
from tests.engine.test_read_arguments import BATCH, arguments, run_of


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(4, 64, rngs=rngs)


@pytest.mark.parametrize("coupled", [False, True])
def test_step_knows_its_calls_and_whether_it_is_coupled(coupled):
    run = run_of(coupled_batch=coupled)
    own = read_loss(run, arguments())
    network = make_network(linear, own.loss.on_sample, own.rows)
    made = make_step(run, own, network)
    assert made.spec.coupled == coupled
    assert made.spec.accumulate == 2
    assert made.spec.forward_flops == 16 * 2 * 4 * 64
    assert made.spec.model_flops == 3 * 16 * 2 * 4 * 64
    assert list(made.checks) == ["loss_fn"]
    assert made.placement.leaves["kernel"].is_split
    state = jax.jit(made.traced.init)(jax.random.key(0))
    assert jax.tree.structure(state) == jax.tree.structure(made.placement.abstract)


def test_an_average_is_sharded_as_what_it_averages():
    """Where a rule names the one's path alone."""
    rules = {"fast/kernel": jax.P(None, "tensor")}
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])
    engine = jaxpar.initialize(
        model={"fast": linear},
        loss_fn={"fast": lambda models, batch: jnp.mean(models["slow"](batch["x"]))},
        optimizer=optax.sgd(0.1),
        sample_batch=BATCH,
        carried={"fast": [jaxpar.Ema(0.9, name="slow")]},
        mesh=mesh,
        rules=rules,
    )
    leaves = engine.loss("fast").seen.leaves
    assert leaves["slow/kernel"].name == "slow/kernel"
    assert leaves["slow/kernel"].compute == leaves["fast/kernel"].compute
    assert leaves["slow/kernel"].compute == (None, "tensor")
