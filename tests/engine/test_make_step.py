"""What is read from a loss's arguments, and what does its step know?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.make_step import RunSpec, make_step, read_loss
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.model.bridge import make_network
from jaxpar.sharding.zero import zero_stage
from jaxpar.step.precision import make_precision

BATCH = {"x": np.ones((16, 4), np.float32)}


def run_of(**change: Any) -> RunSpec:
    right: dict[str, Any] = {
        "mesh": make_mesh(MeshShape(data=4), jax.devices()[:4]),
        "zero": zero_stage(1),
        "precision": make_precision("fp32"),
        "schedule": "1f1b",
        "rules": {},
        "coupled_batch": False,
        "check_loss": True,
        "allow_whole": (),
        "prefetch": None,
        "xla_options": None,
    }
    return RunSpec(**(right | change))


def arguments(**change: Any) -> dict[str, Any]:
    right = {
        "loss_fn": lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        "eval_fn": None,
        "optimizer": optax.sgd(0.1),
        "sample_batch": BATCH,
        "accumulate": 2,
        "clip_norm": None,
        "carried": (),
        "trainable": None,
        "seed": 0,
    }
    return right | change


def test_rows_are_those_of_a_shard_of_a_micro_batch():
    own = read_loss(run_of(), arguments())
    assert own.num_calls == 8
    assert own.rows.batch["x"].shape == (2, 4)
    assert own.evaluation is own.loss
    other = read_loss(run_of(), arguments(eval_fn=lambda model, batch: 0.0))
    assert other.evaluation is not other.loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed=-1 must be an integer"),
        ({"clip_norm": 0.0}, r"clip_norm=0\.0 must be positive"),
        ({"accumulate": 3}, "rows"),
    ],
)
def test_bad_arguments_are_refused_before_tracing(change, message):
    with pytest.raises(ValueError, match=message):
        read_loss(run_of(), arguments(**change))


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
