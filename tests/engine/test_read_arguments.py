"""What is read from the arguments of a run, and of a loss?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.engine.read_arguments import RunSpec, read_loss
from jaxpar.mesh import MeshShape, make_mesh
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
        "two_batch_overlap": None,
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
    halved = read_loss(run_of(two_batch_overlap=True), arguments())
    assert halved.num_calls == 16
    assert halved.rows.batch["x"].shape == (1, 4)
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
