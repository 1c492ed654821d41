"""Does 0/1 Adam do what its definition says, on any mesh and ZeRO stage?

A NumPy simulation of the workers takes each step from the engine's own state, so that
rounding does not grow over steps.
"""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import tree
from jaxpar.optim import zero_one_adam
from tests.equivalence.perceptron import (
    ROWS,
    batches,
    loss_of,
    make_engine,
)
from tests.equivalence.problems import distance
from tests.optim.numpy_zero_one import NumpyZeroOneAdam

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)
RATE, DATA, DECAY = 1e-2, 4, 0.1
NUMBERS = 6, 2, 3, 4
OPTIMIZER = zero_one_adam(
    RATE,
    NUMBERS[0],
    var_update_scaler=NUMBERS[1],
    local_step_scaler=NUMBERS[2],
    local_step_clipper=NUMBERS[3],
    weight_decay=DECAY,
)
STEPS = 20


def many(count: int = STEPS) -> list[dict]:
    return list(itertools.islice(itertools.cycle(batches()), count))


def named(state: Any) -> dict[str, np.ndarray]:
    return tree.named_leaves(jax.device_get(state))


def simulated(engine: jaxpar.Engine, **given: float) -> NumpyZeroOneAdam:
    """The simulation in the state of an engine without a tensor axis."""
    state = engine.state
    carry = jax.device_get(state.carried["reduction"])
    given = {"lr": RATE, "wd": DECAY, **given}
    found = NumpyZeroOneAdam(named(state.params), DATA, NUMBERS, **given)
    found.step_number = int(state.opt_state.counts.sum())
    found.sum_of_rates = float(state.opt_state.rates)
    found.mu, found.nu = named(state.opt_state.mu), named(state.opt_state.nu)
    worker, server = {}, {}
    for name, p in found.params.items():
        worker[name] = carry["worker"][name].reshape(DATA, -1)
        # Element i is in chunk i mod n.
        server[name] = carry["server"][name][:, 0].T.reshape(-1)[: p.size]
        found.moved[name] = carry["moved"][name].astype(np.float64)
        found.momenta[name] = carry["momentum"][name].astype(np.float64)
    found.set_errors(worker, server)
    return found


def gradients(engine: jaxpar.Engine, batch: dict) -> list[dict[str, np.ndarray]]:
    """By worker, the gradient of its rows at its own parameters."""
    state, count = jax.device_get(engine.state), ROWS // DATA
    moved, found = state.carried["reduction"]["moved"], []
    for worker in range(DATA):
        own = slice(worker * count, (worker + 1) * count)
        rows = {name: x[own] for name, x in batch.items()}
        names = tree.named_leaves(state.params)
        leaves = [x - moved[name][worker] for name, x in names.items()]
        params = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
        found.append(named(jax.grad(loss_of)(params, rows)))
    return found


@pytest.mark.parametrize(
    "clip_norm", [None, pytest.param(0.05, marks=pytest.mark.thorough)]
)
def test_each_step_is_that_of_workers_in_numpy(clip_norm, tmp_path: Path) -> None:
    """Through both phases, and a checkpoint between two exchanges."""
    given = {} if clip_norm is None else {"clip_norm": clip_norm}
    engine = make_engine(OPTIMIZER, DATA, 1, 1, **given)
    turned, kinds, metrics = 0, [], {}
    for number, batch in enumerate(many()):
        right = simulated(engine, **given)
        kinds.append(right.kinds[number])
        right.step(gradients(engine, batch))
        metrics = engine.step(batch)
        assert float(metrics["grad_norm"]) == pytest.approx(right.norm, rel=1e-5)
        for name, found in named(engine.state.params).items():
            wrong = np.abs(found - right.params[name]) > 1e-6
            # A sign near zero may be rounded the other way, which moves two chunks.
            turned += int(wrong.sum())
        moved = jax.device_get(engine.state.carried["reduction"]["moved"])
        for name, found in moved.items():
            np.testing.assert_allclose(found, right.moved[name], atol=1e-6)
        if number == 14:
            assert kinds[-1] == "alone"
            engine.save(tmp_path)
            engine.wait()
            engine = make_engine(OPTIMIZER, DATA, 1, 1, **given)
            engine.restore(tmp_path)
    assert turned <= 2
    counts = [kinds.count(kind) for kind in ("whole", "signs", "alone")]
    assert min(counts) > 3
    assert engine.state.opt_state.counts.tolist() == counts
    names = ("rounds_whole", "rounds_signs", "rounds_alone")
    assert [int(metrics[name]) for name in names] == counts


def test_the_warm_up_is_adam() -> None:
    optimizer = zero_one_adam(RATE, 100, weight_decay=DECAY)
    engine = make_engine(optimizer, DATA, 2, 1, clip_norm=0.3)
    adam = optax.adamw(RATE, weight_decay=DECAY)
    plain = make_engine(adam, DATA, 2, 1, clip_norm=0.3)
    for batch in batches():
        found, right = engine.step(batch), plain.step(batch)
        assert float(found["grad_norm"]) == pytest.approx(float(right["grad_norm"]))
    assert distance(engine.state.params, plain.state.params) <= 1e-6


def test_another_number_of_workers_goes_on_from_the_last_exchange(
    tmp_path: Path,
) -> None:
    engine = make_engine(OPTIMIZER, DATA, 1, 1)
    for batch in many():
        engine.step(batch)
    engine.save(tmp_path)
    engine.wait()
    other = make_engine(OPTIMIZER, 2, 1, 1)
    with pytest.warns(match="reduction"):
        other.restore(tmp_path)
    carry = jax.device_get(other.state.carried["reduction"])
    moments = named(engine.state.opt_state.mu)
    for name, own in carry["momentum"].items():
        np.testing.assert_array_equal(own[1], moments[name])
        assert not carry["moved"][name].any()
    losses, right = (
        [float(own.step(batch)["loss"]) for batch in batches()]
        for own in (other, engine)
    )
    assert losses[-1] <= 1.01 * right[-1]


def test_new_parameters_are_every_worker_s() -> None:
    engine = make_engine(OPTIMIZER, DATA, 1, 1)
    for batch in many(11):
        engine.step(batch)
    assert any(x.any() for x in moved_in(engine))  # Between two exchanges.
    zeros = jax.tree.map(np.zeros_like, jax.device_get(engine.state.params))
    engine.load_params(zeros)
    found = float(engine.step(batches()[0])["loss"])
    assert found == pytest.approx(float(loss_of(zeros, batches()[0])), rel=1e-5)


def moved_in(engine: jaxpar.Engine) -> list[np.ndarray]:
    return [*jax.device_get(engine.state.carried["reduction"]["moved"]).values()]


def test_one_worker_has_nothing_to_compress() -> None:
    engine = make_engine(OPTIMIZER, 1, 1, 0)
    assert any("nothing to compress: Adam" in x for x in engine.explain().notes)
    plain = make_engine(optax.adamw(RATE, weight_decay=DECAY), 1, 1, 0)
    for batch in many(8):
        loss, right = engine.step(batch)["loss"], plain.step(batch)["loss"]
        assert float(loss) == pytest.approx(float(right), rel=1e-6)
