"""When are halves of a device's rows computed side by side, and what is said of it?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine.batches import make_batch_spec
from jaxpar.engine.two_batches import halves_of
from jaxpar.mesh import MeshShape, make_mesh

BATCH = {"x": np.ones((16, 4), np.float32)}


def engine_of(**given: Any) -> jaxpar.Engine:
    shape = given.pop("mesh", MeshShape(data=2))
    right: dict[str, Any] = {
        "model": lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        "loss_fn": lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        "optimizer": optax.sgd(0.1),
        "sample_batch": BATCH,
        "mesh": make_mesh(shape, jax.devices()[: shape.num_devices]),
        "two_batch_overlap": True,
    }
    return jaxpar.initialize(**(right | given))


def notes_of(engine: jaxpar.Engine) -> list[str]:
    lines = engine.spec.remarks
    return [line for line in lines if line.startswith("two_batch_overlap:")]


def test_asked_for_it_is_said() -> None:
    (line,) = notes_of(engine_of())
    assert line.endswith(
        "each device computes the two halves of its rows side by side."
    )
    assert not notes_of(engine_of(two_batch_overlap=None)), "the default on CPUs"
    assert not notes_of(engine_of(two_batch_overlap=False))


def mean_over_all(model: Any, batch: Any) -> Any:
    return jaxpar.batch_mean(jnp.mean(model(batch["x"]) ** 2))


OFF: dict[str, tuple[dict[str, Any], str]] = {
    "odd rows": ({"accumulate": 8}, "odd number, 1"),
    "packs": (
        {
            "sample_batch": jaxpar.Packed({"x": np.ones((4, 3, 4), np.float32)}),
        },
        "packs are computed one by one",
    ),
    "coupled": ({"coupled_batch": True}, "couples the rows"),
    "batch_mean": ({"loss_fn": mean_over_all}, "couples the rows"),
}


@pytest.mark.parametrize("case", OFF)
def test_where_it_can_not_it_says_why(case: str) -> None:
    given, reason = OFF[case]
    (line,) = notes_of(engine_of(**given))
    assert line.startswith("two_batch_overlap: off, because ")
    assert reason in line


def test_a_pipeline_has_micro_batches_to_overlap() -> None:
    mesh = make_mesh(MeshShape(data=2, pipe=2), jax.devices()[:4])
    halves = halves_of(True, mesh, make_batch_spec(BATCH, mesh, 2), 2)
    assert halves.times == 1
    assert "pipeline" in (halves.reason or "")


def test_flops_are_those_of_all_rows() -> None:
    assert engine_of().spec.forward_flops == 16 * 2 * 4 * 4


def coupled(model: Any, batch: Any) -> jax.Array:
    y = model(batch["x"])
    return jnp.mean((y - y.mean(0)) ** 2)


@pytest.mark.usefixtures("checked_losses")
def test_a_loss_that_couples_rows_is_found_on_one_device() -> None:
    """Without halves it sees the full batch there, and is right."""
    batch = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
    given = {"loss_fn": coupled, "mesh": MeshShape(data=1), "sample_batch": batch}
    engine_of(**given, two_batch_overlap=False).step(batch)
    with pytest.raises(ValueError, match="not a mean over the rows"):
        engine_of(**given).step(batch)
