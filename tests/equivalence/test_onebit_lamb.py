"""Does 1-bit LAMB do what its definition says, on any mesh and ZeRO stage?

A NumPy simulation of the workers takes each step from the engine's own state, so that
rounding does not grow over steps. Bounds of ratios and factors are in
tests/optim/test_onebit_lamb.py.
"""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.optim import onebit_lamb
from tests.equivalence.onebit_workers import continue_from, gradients, named
from tests.equivalence.perceptron import ROWS, batches, make_engine, make_piped_engine
from tests.equivalence.problems import distance
from tests.optim.numpy_onebit import NumpyOneBitLamb

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)
RATE, FREEZE, DATA, DECAY = 1e-2, 3, 4, 0.1
ONE_BIT = onebit_lamb(RATE, FREEZE, weight_decay=DECAY)
NO_BOUNDS = (0.0, math.inf)
MANY = [*batches(), *batches()]


def simulated(engine: jaxpar.Engine) -> NumpyOneBitLamb:
    found = NumpyOneBitLamb(named(engine.state.params), DATA, FREEZE, wd=DECAY, lr=RATE)
    continue_from(found, engine)
    own = engine.state.opt_state
    found.fresh, found.coeff = named(own.nu_fresh), named(own.coeff)
    found.last = named(own.last_factor)
    return found


def require_same(found: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, right)


def all_of(engine: jaxpar.Engine) -> Any:
    state = engine.state
    return jax.device_get((state.params, state.opt_state, state.carried["reduction"]))


def test_each_step_is_that_of_workers_in_numpy(tmp_path: Path) -> None:
    """Through both phases, a step that is skipped, and a checkpoint."""
    engine = saved = make_engine(ONE_BIT, DATA, 1, 1)
    turned, stop = 0, FREEZE + 3
    for number, batch in enumerate(MANY):
        right, before = simulated(engine), named(engine.state.params)
        right.step(gradients(engine, batch, DATA))
        engine.step(batch)
        for name, found in named(engine.state.params).items():
            # A sign near zero may be rounded the other way, which moves two chunks.
            turned += int((np.abs(found - right.params[name]) > 1e-6).sum())
            assert np.abs(found - before[name]).max() > 0
        if number + 1 == stop:
            bad = {name: x.copy() for name, x in batch.items()}
            bad["x"][ROWS - 1] = np.nan  # Of one worker alone.
            before = all_of(engine)
            assert int(engine.step(bad)["skipped"]) == 1
            require_same(all_of(engine), before)
            engine.save(tmp_path)
            engine.wait()
            engine = make_engine(ONE_BIT, DATA, 1, 1)
            engine.restore(tmp_path)
    assert turned <= 2
    assert any(
        float(x) != 1 for x in named(engine.state.opt_state.last_factor).values()
    )
    for batch in MANY[stop:]:
        saved.step(batch)
    require_same(all_of(saved), all_of(engine))


@pytest.mark.thorough
def test_the_warm_up_is_lamb() -> None:
    bounds = {"coeff_bounds": NO_BOUNDS, "weight_decay": DECAY}
    engine = make_engine(onebit_lamb(RATE, 100, **bounds), DATA, 2, 1)
    plain = make_engine(optax.lamb(RATE, weight_decay=DECAY), DATA, 2, 1)
    for batch in batches():
        found, right = engine.step(batch), plain.step(batch)
        assert float(found["grad_norm"]) == pytest.approx(float(right["grad_norm"]))
    assert distance(engine.state.params, plain.state.params) <= 1e-6


@pytest.mark.thorough
def test_trains_in_a_pipeline() -> None:
    """Each layer of a stage's stack is in one leaf, which has one ratio as in optax."""
    own = onebit_lamb(RATE, FREEZE, coeff_bounds=NO_BOUNDS)
    engine, plain = map(make_piped_engine, (own, optax.lamb(RATE)))
    losses = []
    for batch in MANY:
        losses.append(float(engine.step(batch)["loss"]))
        right = float(plain.step(batch)["loss"])
        if len(losses) <= FREEZE:
            assert losses[-1] == pytest.approx(right, rel=1e-5)
    assert losses[-1] < losses[0]
    engine.verify()


@pytest.mark.thorough
def test_goes_on_with_one_data_shard_and_comes_back(tmp_path: Path) -> None:
    """Nothing is compressed there: it is LAMB, with the fresh second moment."""
    engine = make_engine(ONE_BIT, DATA, 1, 1)
    for batch in batches():
        engine.step(batch)
    engine.save(tmp_path / "many")
    engine.wait()
    alone = make_engine(ONE_BIT, 1, 1, 0)
    assert any("nothing to compress: LAMB" in x for x in alone.explain().notes)
    alone.restore(tmp_path / "many")
    right, frozen = simulated(engine), named(alone.state.opt_state.nu)
    right.freeze, right.nu = len(batches()) + 1, right.fresh
    right.step([named(x) for x in gradients(alone, batches()[0], 1)])
    alone.step(batches()[0])
    for name, found in named(alone.state.params).items():
        np.testing.assert_allclose(found, right.params[name], atol=1e-6)
    require_same(named(alone.state.opt_state.nu), frozen)
    alone.save(tmp_path / "one")
    alone.wait()
    with pytest.warns(match="reduction"):
        engine.restore(tmp_path / "one")
    right = simulated(engine)
    right.step(gradients(engine, batches()[1], DATA))
    engine.step(batches()[1])
    wrong = [
        (np.abs(found - right.params[name]) > 1e-6).sum()
        for name, found in named(engine.state.params).items()
    ]
    assert sum(wrong) <= 2
