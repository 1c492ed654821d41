"""Does an optimizer written outside the package train as its rule in plain JAX?

At ZeRO 3 with tensor parallelism, on a pipe, over micro-batches, in fp16, with skipped
steps, and from a checkpoint. A sign turns where a gradient is rounding; here none is,
so parameters agree to 1e-6.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from tests.equivalence.perceptron import (
    batches,
    make_engine,
    make_piped_engine,
    run_blocks_plainly,
    run_plainly,
)
from tests.equivalence.problems import distance
from tests.optim.sign_momentum import SignMomentum, plain

OPTIMIZER = SignMomentum(1e-2)

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)


@functools.cache
def right() -> tuple[list[float], dict]:
    return run_plainly(plain(1e-2), takes_value=False)


def losses_of(engine: jaxpar.Engine, batches: list[dict]) -> list[float]:
    return [float(engine.step(batch)["loss"]) for batch in batches]


def leaves_of(engine: jaxpar.Engine) -> list[np.ndarray]:
    state = engine.state
    return jax.tree.leaves(jax.device_get((state.params, state.opt_state)))


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.thorough),
        *(pytest.param(zero, marks=pytest.mark.slow) for zero in (2,)),
        3,
    ],
)
def test_trains_like_the_plain_rule_at_every_stage(zero: int) -> None:
    engine = make_engine(OPTIMIZER, 4, 2, zero, accumulate=2)
    losses, params = right()
    assert losses_of(engine, batches()) == pytest.approx(losses, rel=1e-5)
    assert distance(engine.state.params, params) <= 1e-6
    packed = engine._packed.opt_state["momentum"]
    assert {leaf.dtype for leaf in jax.tree.leaves(packed)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("fp16", marks=pytest.mark.thorough)]
)
def test_skipped_step_changes_nothing(precision: str) -> None:
    """And the run goes on as if the batch had not been there."""
    engine = make_engine(OPTIMIZER, 4, 2, zero=3, precision=precision)
    wrong = {name: np.full_like(rows, np.inf) for name, rows in batches()[0].items()}
    found = losses_of(engine, batches()[:3])
    before = leaves_of(engine)
    assert int(engine.step(wrong)["skipped"]) == 1
    assert all(map(np.array_equal, before, leaves_of(engine)))
    found += losses_of(engine, batches()[3:])
    losses, params = right()
    # In fp16, gradients and so some signs are those of rounded parameters.
    exactly = precision == "fp32"
    assert found == pytest.approx(losses, rel=1e-5 if exactly else 1e-2)
    assert distance(engine.state.params, params) <= (1e-6 if exactly else 5e-2)
    assert float(engine.state.opt_state["count"]) == len(batches())


def test_goes_on_from_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    engine = make_engine(OPTIMIZER, 4, 2, zero=3)
    found = losses_of(engine, batches()[:3])
    engine.save(tmp_path)
    engine.wait()
    other = make_engine(OPTIMIZER, 8, 1, zero=1)
    other.restore(tmp_path)
    assert all(map(np.array_equal, leaves_of(engine), leaves_of(other)))
    found += losses_of(other, batches()[3:])
    losses, params = right()
    assert found == pytest.approx(losses, rel=1e-5)
    assert distance(other.state.params, params) <= 1e-6


def test_tools_know_it() -> None:
    """Its bytes are those of its packed state: fp32 masters and a bf16 momentum."""
    engine = make_engine(OPTIMIZER, 4, 2, zero=1)
    explained = {leaf.name: leaf for leaf in engine.explain().leaves}
    momentum = explained["opt_state/momentum/up/kernel"]
    assert (momentum.dtype, momentum.bytes) == ("bfloat16", 2 * 16 * 64)
    engine.verify()
    engine.probe()


@pytest.mark.thorough
def test_trains_like_the_plain_rule_on_a_pipe() -> None:
    engine = make_piped_engine(OPTIMIZER)
    params = jax.device_get(engine.state.params)
    losses, params = run_blocks_plainly(plain(1e-2), params, batches())
    assert losses_of(engine, batches()) == pytest.approx(losses, rel=1e-5)
    assert distance(engine.state.params, params) <= 1e-6
