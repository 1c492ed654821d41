"""Does 1-bit Adam do what its definition says, on any mesh and ZeRO stage?

A NumPy simulation of the workers takes each step from the engine's own state, so that
rounding does not grow over steps.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models import decoder_loss, make_decoder
from jaxpar.models.experts import ExpertsConfig
from jaxpar.optim import onebit_adam
from tests.equivalence.looped_gpt import CONFIG
from tests.equivalence.looped_gpt import batches as token_batches
from tests.equivalence.onebit_workers import continue_from, gradients, named
from tests.equivalence.perceptron import (
    Net,
    batches,
    loss_fn,
    make_engine,
)
from tests.equivalence.problems import distance
from tests.optim.numpy_onebit import NumpyOneBitAdam

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)
RATE, FREEZE, DATA = 1e-2, 3, 4
ONE_BIT = onebit_adam(RATE, FREEZE)
MANY = [*batches(), *batches()]


def test_each_step_is_that_of_workers_in_numpy(tmp_path: Path) -> None:
    """Through both phases, and a checkpoint in the second one."""
    engine = make_engine(ONE_BIT, DATA, 1, 1)
    turned = 0
    for number, batch in enumerate(MANY):
        right = NumpyOneBitAdam(before := named(engine.state.params), DATA, FREEZE)
        continue_from(right, engine)
        right.step(gradients(engine, batch, DATA))
        engine.step(batch)
        for name, found in named(engine.state.params).items():
            wrong = np.abs(found - right.params[name]) > 1e-6
            # A sign near zero may be rounded the other way, which moves two chunks.
            turned += int(wrong.sum())
            assert np.abs(found - before[name]).max() > 0
        if number == FREEZE + 2:
            engine.save(tmp_path)
            engine.wait()
            engine = make_engine(ONE_BIT, DATA, 1, 1)
            engine.restore(tmp_path)
    assert turned <= 2


def test_clipping_is_by_one_norm_of_all_workers() -> None:
    engine = make_engine(ONE_BIT, DATA, 1, 1, clip_norm=0.05, accumulate=2)
    for batch in MANY:
        params = named(engine.state.params)
        right = NumpyOneBitAdam(params, DATA, FREEZE, clip_norm=0.05)
        continue_from(right, engine)
        right.step(gradients(engine, batch, DATA))
        assert right.norm > 0.05
        found = engine.step(batch)
        assert float(found["grad_norm"]) == pytest.approx(right.norm, rel=1e-5)
        assert distance(named(engine.state.params), right.params) <= 1e-6


def test_the_warm_up_is_adam() -> None:
    one_bit = onebit_adam(RATE, 100, weight_decay=0.1)
    engine = make_engine(one_bit, DATA, 2, 1, clip_norm=0.3)
    plain = make_engine(optax.adamw(RATE, weight_decay=0.1), DATA, 2, 1, clip_norm=0.3)
    for batch in batches():
        found, right = engine.step(batch), plain.step(batch)
        assert float(found["grad_norm"]) == pytest.approx(float(right["grad_norm"]))
    assert distance(engine.state.params, plain.state.params) <= 1e-6


def test_a_dim_may_be_split_over_tensor_and_data() -> None:
    """4 does not divide 17 columns, so that data splits the rows as tensor does."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 32)).astype(np.float32)}

    def make(tensor: int) -> jaxpar.Engine:
        shape = jaxpar.MeshShape(data=DATA, tensor=tensor)
        return jaxpar.initialize(
            model=lambda rngs: nnx.Linear(32, 17, rngs=rngs),
            loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2),
            optimizer=ONE_BIT,
            sample_batch=batch,
            mesh=jaxpar.make_mesh(shape, jax.devices()[: shape.num_devices]),
            rules={"kernel": jax.P("tensor", None)},
        )

    engine, plain = make(2), make(1)
    kernel = next(x for x in engine.placement.trained if x.name == "kernel")
    assert kernel.shares_dim
    for _ in range(FREEZE + 2):
        loss, right = engine.step(batch)["loss"], plain.step(batch)["loss"]
        assert float(loss) == pytest.approx(float(right), rel=1e-5)


@pytest.mark.thorough
def test_replicas_are_workers_as_other_data_shards() -> None:
    shape = jaxpar.MeshShape(replica=2, data=2, tensor=2)
    engine = jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=ONE_BIT,
        sample_batch=batches()[0],
        mesh=jaxpar.make_mesh(shape, jax.devices()),
        zero=1,
        rules={"mlp": "tensor"},
    )
    plain = make_engine(ONE_BIT, DATA, 1, 1)
    for batch in batches():
        loss, right = engine.step(batch)["loss"], plain.step(batch)["loss"]
        assert float(loss) == pytest.approx(float(right), rel=1e-5)
    engine.verify()


def test_another_number_of_workers_goes_on_from_the_momentum(tmp_path: Path) -> None:
    engine = make_engine(ONE_BIT, DATA, 1, 1)
    for batch in batches():
        engine.step(batch)
    engine.save(tmp_path)
    engine.wait()
    other = make_engine(ONE_BIT, 2, 1, 1)
    with pytest.warns(match="reduction"):
        other.restore(tmp_path)
    carry, momentum = (
        jax.device_get(own.state.carried["reduction"]) for own in (other, engine)
    )
    for name, own in carry["momentum"].items():
        np.testing.assert_array_equal(own[0], momentum["momentum"][name][0])
        assert not carry["worker"][name].any()
    losses, right = (
        [float(own.step(batch)["loss"]) for batch in batches()]
        for own in (other, engine)
    )
    assert losses[-1] <= 1.01 * right[-1]


def test_one_worker_has_nothing_to_compress() -> None:
    engine = make_engine(ONE_BIT, 1, 1, 0)
    assert any("nothing to compress: Adam" in x for x in engine.explain().notes)
    plain = make_engine(optax.adam(RATE), 1, 1, 0)
    for batch in batches():
        loss, right = engine.step(batch)["loss"], plain.step(batch)["loss"]
        assert float(loss) == pytest.approx(float(right), rel=1e-6)


def test_experts_on_an_axis_are_refused() -> None:
    """Their gradients are averaged over other data shards than the rest's."""
    config = dataclasses.replace(CONFIG, experts=ExpertsConfig(num=4, top_k=2))
    with pytest.raises(ValueError, match=r"expert=2: .* other data shards than"):
        jaxpar.initialize(
            model=make_decoder(config),
            loss_fn=decoder_loss,
            optimizer=ONE_BIT,
            sample_batch=token_batches()[0],
            mesh=jaxpar.make_mesh(
                jaxpar.MeshShape(data=2, expert=2), jax.devices()[:4]
            ),
            zero=1,
        )
