"""Does a reduction from outside the package train, save and keep to its bytes?

In int8 with error feedback. Parameters end within 1e-3 of the plain run's, per leaf:
six steps of 1e-3 move a leaf by about 1e-2, and int8 rounds a gradient by at most 1/254
of the largest.
"""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.optim import WithReduction
from tests.equivalence.perceptron import (
    batches,
    make_engine,
    make_piped_engine,
    run_plainly,
)
from tests.equivalence.problems import distance
from tests.optim.int8_reduction import Int8Reduction

ADAMW = optax.adamw(1e-3, eps=1e-6)
INT8 = WithReduction(ADAMW, Int8Reduction())
BOUND = 1e-3


def losses_of(engine: jaxpar.Engine, batches: list[dict]) -> list[float]:
    return [float(engine.step(batch)["loss"]) for batch in batches]


def carried(engine: jaxpar.Engine) -> Any:
    return jax.device_get(engine.state.carried["reduction"])


@pytest.mark.parametrize(
    ("data", "tensor", "zero", "accumulate"),
    [
        (4, 2, 1, 2),
        (8, 1, 0, 1),
        (4, 2, 0, 2),
        (8, 1, 1, 1),
    ],
)
def test_trains_like_the_plain_reduction_and_keeps_to_its_bytes(
    data, tensor, zero, accumulate
):
    engine = make_engine(INT8, data, tensor, zero, accumulate=accumulate)
    losses, params = run_plainly(ADAMW, takes_value=False)
    assert losses_of(engine, batches()) == pytest.approx(losses, rel=2e-4)
    assert 1e-6 < distance(engine.state.params, params) < BOUND
    engine.verify()
    engine.probe()
    sent = engine.closed_form_budget().communicated["data"]
    assert sent["all-to-all"] <= (16 * 64 + 64 + 64 * 8 + 8) // tensor + 1000


def test_what_rounding_leaves_out_is_in_the_next_steps_gradient():
    """So the sum of many steps' gradients is the sum of the plain ones."""
    sgd = optax.sgd(1.0)
    rate = 1e-3

    def ends(optimizer: Any) -> Any:
        engine = make_engine(optimizer, 8, 1, 1)
        for _ in range(30):
            engine.step(batches()[0])
        return engine.state.params

    scaled = optax.chain(sgd, optax.scale(rate))
    right = ends(scaled)
    fed = distance(ends(WithReduction(scaled, Int8Reduction())), right)
    lost = distance(ends(WithReduction(scaled, WithoutFeedback())), right)
    assert fed < lost / 2


class WithoutFeedback(Int8Reduction):
    def reduce(self, leaves, grads, carry, collectives):
        sums, _ = super().reduce(leaves, grads, carry, collectives)
        return sums, carry


def test_trains_like_the_plain_reduction_on_a_pipe():
    """Biases begin at 0, so that six steps are all of them."""
    plain, own = make_piped_engine(ADAMW), make_piped_engine(INT8)
    losses = losses_of(plain, batches())
    assert losses_of(own, batches()) == pytest.approx(losses, rel=2e-4)
    assert 1e-6 < distance(own.state.params, plain.state.params) < 10 * BOUND
    own.verify()


def test_one_data_shard_exchanges_nothing_and_trains_plainly():
    engine = make_engine(INT8, 1, 2, zero=1)
    losses, params = run_plainly(ADAMW, takes_value=False)
    assert losses_of(engine, batches()) == pytest.approx(losses, rel=1e-5)
    assert distance(engine.state.params, params) < 1e-6
    assert "reduction" not in engine.state.carried
    engine.verify()


def test_error_of_every_shard_is_stored_on_it_and_counted():
    engine = make_engine(INT8, 4, 2, zero=1)
    engine.step(batches()[0])
    kernel = engine.state.carried["reduction"]["up/kernel"]
    assert kernel.shape == (4, 16, 64)
    assert kernel.sharding.shard_shape(kernel.shape) == (1, 16, 32)
    errors = carried(engine)["up/kernel"]
    assert not np.array_equal(errors[0], errors[1])
    explained = engine.explain()
    assert "data: gradients are sent in int8." in explained.notes
    rows = {leaf.name: leaf for leaf in explained.leaves}
    assert rows["carried/reduction/up/kernel"].bytes_per_device == 4 * 16 * 32
    engine.probe()


@pytest.mark.filterwarnings("ignore::jaxpar.engine.run_ahead.SkippedStepWarning")
def test_step_that_is_not_finite_is_skipped_and_leaves_the_errors_as_they_are():
    """Though int8 holds no NaN."""
    engine = make_engine(INT8, 8, 1, zero=1)
    engine.step(batches()[0])
    before = carried(engine)
    wrong = {name: np.full_like(rows, np.inf) for name, rows in batches()[0].items()}
    assert int(engine.step(wrong)["skipped"]) == 1
    engine.step(batches()[1])
    other = make_engine(INT8, 8, 1, zero=1)
    losses_of(other, batches()[:2])
    jax.tree.map(np.testing.assert_array_equal, carried(engine), carried(other))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(before))


def test_checkpoint_restores_errors_on_the_same_shards_and_begins_them_elsewhere(
    tmp_path: Path,
):
    engine = make_engine(INT8, 4, 2, zero=1)
    losses_of(engine, batches()[:3])
    engine.save(tmp_path)
    engine.wait()
    same = make_engine(INT8, 4, 1, zero=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.restore(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, carried(same), carried(engine))
    other = make_engine(INT8, 8, 1, zero=1)
    other.step(batches()[0])
    said = r"carried/reduction starts anew: it was saved on data 4, not data 8\."
    with pytest.warns(UserWarning, match=said):
        other.restore(tmp_path)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(carried(other)))
    assert distance(other.state.params, engine.state.params) == 0
    # And saves into the same folder go on.
    other.step(batches()[3])
    other.save(tmp_path)
    other.wait()


def test_runs_with_and_without_a_reduction_go_on_from_each_other(tmp_path: Path):
    engine = make_engine(INT8, 8, 1, zero=1)
    losses_of(engine, batches()[:2])
    engine.save(tmp_path / "own")
    engine.wait()
    plain = make_engine(ADAMW, 8, 1, zero=1)
    plain.restore(tmp_path / "own")
    assert distance(plain.state.params, engine.state.params) == 0
    plain.save(tmp_path / "plain")
    plain.wait()
    said = "carried/reduction starts anew: the checkpoint does not hold it"
    with pytest.warns(UserWarning, match=said):
        engine.restore(tmp_path / "plain")
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(carried(engine)))


class Unsaved(Int8Reduction):
    saved = False


def test_what_is_not_to_be_saved_begins_anew_without_a_word(tmp_path: Path):
    engine = make_engine(WithReduction(ADAMW, Unsaved()), 8, 1, zero=1)
    losses_of(engine, batches()[:2])
    engine.save(tmp_path)
    engine.wait()
    assert any(np.any(leaf) for leaf in jax.tree.leaves(carried(engine)))
    engine.restore(tmp_path)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(carried(engine)))
