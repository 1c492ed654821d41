"""Is the carried average what NumPy computes, on any mesh, with any optimizer?"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.tree import named_leaves
from tests.model.toys import BATCHES, loss_fn, make_model

DECAY = 0.75


def make_engine(mesh: jaxpar.MeshShape, **change: Any) -> jaxpar.Engine:
    right = {
        "model": make_model(num_blocks=4),
        "loss_fn": loss_fn,
        "optimizer": optax.adam(0.1, eps=1e-3),
        "sample_batch": BATCHES[0],
        "mesh": mesh,
        "accumulate": 2,
        "carried": [jaxpar.Ema(DECAY)],
    }
    return jaxpar.initialize(**(right | change))


def parameters(engine: jaxpar.Engine) -> dict[str, np.ndarray]:
    return {k: np.array(x) for k, x in named_leaves(engine.state.params).items()}


Mesh = jaxpar.MeshShape
thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("mesh", "change"),
    [
        (Mesh(data=2, tensor=2), {"zero": 3}),
        pytest.param(Mesh(data=2, pipe=2), {"zero": 1}, marks=thorough),
        pytest.param(
            Mesh(data=2),
            {"zero": 2, "optimizer": jaxpar.optim.fused_adamw(0.1, bits=8)},
            marks=thorough,
        ),
    ],
)
def test_average_is_of_the_parameters_of_every_step(mesh, change, tmp_path):
    engine = make_engine(mesh, **change)
    right = parameters(engine)
    for batch in BATCHES:
        engine.step(batch)
        new = parameters(engine)
        right = {k: DECAY * right[k] + (1 - DECAY) * new[k] for k in right}
    found = named_leaves(engine.state.carried["ema"])
    for name, leaf in named_leaves(engine.state.params).items():
        np.testing.assert_allclose(found[name], right[name], rtol=1e-6, atol=1e-7)
        assert found[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    average = engine.state.carried["ema"]
    evaluated = float(engine.evaluate(BATCHES[0], params=average)["loss"])
    assert evaluated != float(engine.evaluate(BATCHES[0])["loss"])

    engine.save(tmp_path)
    engine.wait()
    other = make_engine(Mesh(data=1))
    other.restore(tmp_path, reset=["opt_state/*"])
    jax.tree.map(np.testing.assert_array_equal, other.state.carried["ema"], average)
    again = float(other.evaluate(BATCHES[0], params=average)["loss"])
    assert again == pytest.approx(evaluated, rel=1e-5)


def test_skipped_step_leaves_the_average_as_it_is():
    engine = make_engine(Mesh(data=1), loss_fn=loss_of_no_weight)
    before = jax.device_get(engine.state.carried["ema"])
    assert int(engine.step(BATCHES[0])["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, engine.state.carried["ema"], before)


def loss_of_no_weight(model, batch):
    return jaxpar.Weighted(loss_fn(model, batch) * 0, jax.numpy.float32(0))


@pytest.mark.thorough
def test_state_of_an_average_is_counted_and_kept_to_its_budget():
    engine = make_engine(Mesh(data=8), zero=1, accumulate=1)
    plain = make_engine(Mesh(data=8), zero=1, accumulate=1, carried=[])
    average = engine.verify().state_bytes - plain.verify().state_bytes
    sizes = [
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(engine.state.params)
    ]
    assert average == sum(sizes)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_that_is_none_is_refused(decay):
    with pytest.raises(
        ValueError, match=f"decay={decay} must be at least 0 and below 1"
    ):
        jaxpar.Ema(decay)
