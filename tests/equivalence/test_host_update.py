"""Does a step of two programs, with NumPy between them, train as one with optax?

Adam in NumPy rounds in another order than XLA's, so parameters agree to 1e-6.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.engine.host_programs import HostBetween
from jaxpar.engine.step_program import OneJit
from tests.equivalence.perceptron import batches, make_engine, make_piped_engine
from tests.equivalence.problems import distance
from tests.optim.numpy_adam import NumpyAdam, NumpyUpdate

RATE, CLIP = 1e-2, 0.5

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)


def make(optimizer: Any, zero: int = 1, **options: Any) -> jaxpar.Engine:
    return make_engine(optimizer, 4, 2, zero, clip_norm=CLIP, **options)


def pair(zero: int = 1, **options: Any) -> list[jaxpar.Engine]:
    """Engines of NumPy's Adam, and of optax's."""
    return [make(o, zero, **options) for o in (NumpyAdam(RATE), optax.adam(RATE))]


def leaves_of(engine: jaxpar.Engine) -> list[np.ndarray]:
    state = engine.state
    return jax.tree.leaves(jax.device_get((state.params, state.opt_state)))


def assert_alike(engine: jaxpar.Engine, other: jaxpar.Engine) -> None:
    assert distance(engine.state.params, other.state.params) <= 1e-6
    for one, right in zip(leaves_of(engine), leaves_of(other), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        pytest.param(0, {}, marks=pytest.mark.thorough),
        pytest.param(1, {"accumulate": 4}, marks=pytest.mark.slow),
        pytest.param(2, {"accumulate": 2}, marks=pytest.mark.slow),
        (3, {"accumulate": 2}),
    ],
)
def test_trains_like_optax_in_one_program(zero: int, options: dict) -> None:
    engine, plain = pair(zero, **options)
    assert isinstance(engine.loss().program.step, HostBetween)
    assert isinstance(plain.loss().program.step, OneJit)
    for batch in batches():
        found, right = engine.step(batch), plain.step(batch)
        for name in ("loss", "grad_norm", "skipped"):
            assert float(found[name]) == pytest.approx(float(right[name]), rel=1e-5)
    assert_alike(engine, plain)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(engine.state.opt_state)}
    assert kinds == {"pinned_host"}


@pytest.mark.thorough
def test_trains_like_optax_on_a_pipe() -> None:
    engine, plain = map(make_piped_engine, (NumpyAdam(RATE), optax.adam(RATE)))
    for batch in batches():
        loss, right = engine.step(batch)["loss"], plain.step(batch)["loss"]
        assert float(loss) == pytest.approx(float(right), rel=1e-5)
    assert_alike(engine, plain)


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("fp16", marks=pytest.mark.thorough)]
)
def test_skipped_step_changes_nothing(precision: str) -> None:
    """And reports it, and the next one counts."""
    engine, plain = pair(3, precision=precision)
    wrong = {name: np.full_like(rows, np.inf) for name, rows in batches()[0].items()}
    for batch in batches()[:2]:
        engine.step(batch)
    before = leaves_of(engine)
    metrics = engine.step(wrong)
    assert int(metrics["skipped"]) == 1
    assert all(map(np.array_equal, before, leaves_of(engine)))
    engine.step(batches()[2])
    assert not any(map(np.array_equal, before, leaves_of(engine)))
    for batch in batches()[:3]:
        plain.step(batch)
    if precision == "fp32":
        assert_alike(engine, plain)


@pytest.mark.parametrize(
    "to_numpy",
    [
        pytest.param(True, id="to NumPy"),
        pytest.param(False, id="to optax", marks=pytest.mark.thorough),
    ],
)
def test_checkpoint_moves_between_the_two(to_numpy: bool, tmp_path: Path) -> None:
    optimizers = [optax.adam(RATE), NumpyAdam(RATE)]
    first, second = optimizers if to_numpy else optimizers[::-1]
    engine, other, whole = make(first, 3), make(second, 1), make(first, 3)
    for batch in batches()[:3]:
        engine.step(batch)
    engine.save(tmp_path)
    engine.wait()
    other.restore(tmp_path)
    assert all(map(np.array_equal, leaves_of(engine), leaves_of(other)))
    for batch in batches():
        whole.step(batch)
    for batch in batches()[3:]:
        other.step(batch)
    assert_alike(other, whole)


def test_pure_step_is_the_engines() -> None:
    engine, _ = pair()
    state = jax.tree.map(lambda x: x, engine.state)
    for batch in batches()[:2]:
        state, metrics = engine.train_step(state, batch)
        found = engine.step(batch)
        assert float(metrics["loss"]) == float(found["loss"])
    pure = jax.tree.leaves(jax.device_get((state.params, state.opt_state)))
    assert all(map(np.array_equal, pure, leaves_of(engine)))


def test_tools_see_all_of_its_programs() -> None:
    engine, plain = pair()
    report, right = engine.explain(), plain.explain()
    assert list(report.program.parts) == ["gradients", "update"]
    first, second = report.program.parts.values()
    assert report.program.memory.peak > max(first.memory.peak, second.memory.peak)
    assert report.program.communicated_bytes("all-gather") == (
        right.program.communicated_bytes("all-gather")
    )
    assert "- gradients: peak " in report.details
    assert "- update: peak " in report.details
    read = json.loads(report.as_json())["program"]["parts"]
    assert read["update"]["memory"]["aliased"] > 0, "the state is donated"
    assert right.program.parts == {}
    budget, recorded = engine.verify(), plain.verify()
    total = budget.state_bytes + budget.host_state_bytes
    assert total == recorded.state_bytes
    assert engine.verify(budget) == budget
    engine.probe()


def test_over_a_budget_names_what_any_program_sends() -> None:
    engine, _ = pair()
    budget = dataclasses.replace(engine.budget(), communicated={}, small_bytes=0)
    with pytest.raises(jaxpar.BudgetExceeded, match=r"data: .* moves .* bytes a step"):
        engine.verify(budget)


@pytest.mark.thorough
def test_plan_says_what_it_leaves_out() -> None:
    engine, plain = pair()
    plan, right = (jaxpar.plan(each, "cpu:8") for each in (engine, plain))
    assert plan.memory.host_state == right.memory.optimizer
    assert plan.memory.batch == right.memory.batch
    assert plan.flops_per_step == right.flops_per_step
    assert "2 programs (gradients, update), between which" in plan.notes[-1]


def test_shardings_of_gradients_are_checked(compiled: list[str]) -> None:
    class Lacking(NumpyUpdate):
        def grads_shardings(self, params):
            return {"out": params["out"]}

    class Makes(NumpyAdam):
        def make_update(self, spec):
            return Lacking(self)

    message = r"Lacking\.grads_shardings returns other leaves than .*'grads/up/bias'"
    with pytest.raises(ValueError, match=message):
        make(Makes(RATE))
    assert compiled == []
