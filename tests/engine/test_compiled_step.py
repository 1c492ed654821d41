"""What does a step hold and send, read from its program, and is a budget enforced?"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.budget import Budget, BudgetExceeded

BATCH = {"x": np.ones((8, 64), np.float32)}
PARAMS = 64 * 512 + 512
SLACK = {"tolerance": 2.0, "small_bytes": 1 << 20}
STATE_BESIDES = 64
"""Bytes, at most, of the step, the key and the loss scaler's state."""


def make_engine(zero: int = 1) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=lambda rngs: nnx.Linear(64, 512, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        optimizer=optax.adam(0.1),
        sample_batch=BATCH,
        mesh=jaxpar.MeshShape(data=8),
        zero=zero,
    )


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def budget(engine) -> Budget:
    return engine.budget()


def test_budget_has_the_bytes_of_a_devices_share(budget):
    """Masters and two moments in fp32, an eighth of each."""
    own = 3 * 4 * PARAMS // 8
    assert own <= budget.state_bytes <= own + STATE_BESIDES
    assert budget.peak_bytes is not None
    assert budget.peak_bytes >= own


def test_gradients_are_reduced_and_parameters_gathered_over_data(budget):
    """Stage 1: each once a step, in fp32."""
    communicated = dict(budget.communicated["data"])
    assert communicated.pop("all-gather") == 4 * PARAMS
    # XLA:CPU may make all-reduces of reduce-scatters.
    assert sum(communicated.values()) == pytest.approx(4 * PARAMS, abs=256)


@pytest.mark.parametrize("zero", [0, 1])
def test_closed_form_has_the_stages_state(zero):
    formed = make_engine(zero).closed_form_budget()
    own = 3 * 4 * PARAMS // (1 if zero == 0 else 8)
    assert own <= formed.state_bytes <= own + STATE_BESIDES


def test_closed_form_describes_the_step(engine):
    form = engine.closed_form
    assert form.sizes == {"data": 8, "pipe": 1, "tensor": 1}
    assert (form.zero.number, form.accumulate, form.coupled) == (1, 1, False)
    assert form.platform == "cpu"


def test_step_within_its_budget_returns_what_it_measured(engine, budget):
    assert engine.verify() == budget
    assert engine.verify(budget) == budget


def test_step_over_a_budget_raises_with_what_is_over(engine, budget):
    less = dataclasses.replace(
        budget, state_bytes=budget.state_bytes // 2, small_bytes=0, communicated={}
    )
    with pytest.raises(BudgetExceeded) as caught:
        engine.verify(less)
    state, *others = caught.value.violations
    number = budget.state_bytes
    assert state.startswith(f"state: {number:,} bytes per device, but the budget is")
    assert any("all-gather" in other for other in others)
    assert engine.verify(dataclasses.replace(less, **SLACK)) == budget


def test_lowered_step_names_its_arguments(engine):
    # Donated leaves and batch, as the compiler shows them in an HLO dump.
    text = engine.lower().as_text(debug_info=True)
    assert '"state[0]"' in text
    assert "batch['x']" in text


def test_explanation_is_that_of_the_program(engine):
    explained = engine.explain()
    (row,) = (leaf for leaf in explained.leaves if leaf.name == "params/kernel")
    assert row.bytes_per_device == 4 * 64 * 512 // 8


def test_unknown_attribute_raises_and_plan_names_its_replacement(engine):
    with pytest.raises(AttributeError, match=r"^Engine has no attribute 'compile'\.$"):
        _ = engine.compile
    message = (
        r"^Engine has no attribute 'plan'\. Call jaxpar\.plan\(engine, target\)\.$"
    )
    with pytest.raises(AttributeError, match=message):
        _ = engine.plan
    assert not hasattr(engine, "plan")
