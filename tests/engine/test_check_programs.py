"""Do the programs of a loss's check compute what NumPy does on the same rows?

Half of a shard's rows are mixed with as many of the shard half the data axis away.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.engine import check_programs, make_step
from jaxpar.step.loss_check import HALF_TOLERANCE, TOLERANCE, LossCheck, NoCheck

ROWS, DATA = 16, 4
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)


class Shown(LossCheck):
    """A check whose functions can be called."""

    def __init__(self, argument, compare, whole, tolerance):
        super().__init__(argument, compare, whole, tolerance)
        self.argument, self.tolerance = argument, tolerance
        self.compare, self.whole = compare, whole


def mean_loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2), {"n": jaxpar.Sum(batch["x"].shape[0])}


def sum_loss(model, batch):
    return jnp.sum(model(batch["x"]) ** 2)


def max_loss(model, batch):
    return jnp.max(model(batch["x"]))


@pytest.fixture
def make_checks(monkeypatch: pytest.MonkeyPatch, checked_losses: None) -> Any:
    """`make_checks(loss_fn, ...)`: an engine and its checks, which can be called."""
    found = {}

    def kept(*given: Any) -> dict[str, NoCheck]:
        found.update(check_programs.make_loss_checks(*given))
        return found

    monkeypatch.setattr(check_programs, "LossCheck", Shown)
    monkeypatch.setattr(make_step, "make_loss_checks", kept)

    def make(loss_fn: Any, **change: Any) -> tuple[jaxpar.Engine, dict[str, Any]]:
        given = {
            "model": lambda rngs: nnx.Linear(3, 2, rngs=rngs),
            "loss_fn": loss_fn,
            "optimizer": optax.sgd(0.1),
            "sample_batch": {"x": X},
            "mesh": jaxpar.MeshShape(data=DATA, tensor=2),
        }
        return jaxpar.initialize(**(given | change)), found

    return make


def called(engine: jaxpar.Engine, program: Any, noise: float = 0.0) -> dict[str, Any]:
    state, batch = engine.state, engine.batch_spec.put({"x": X})
    given = state.weights, state.model_state, batch, state.step, state.key, noise
    return jax.device_get(program(*given))


def outputs(engine: jaxpar.Engine) -> np.ndarray:
    params = jax.device_get(engine.state.params)
    return X @ params["kernel"] + params["bias"]


def halves_of(out: np.ndarray, accumulate: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """By shard: its own first rows, and the other shard's of the second micro-batch."""
    shards = out.reshape(DATA, ROWS // DATA, -1)
    half = ROWS // DATA // accumulate // 2
    second = 1 % accumulate
    return [
        (
            shards[i][::accumulate][:half],
            shards[(i + DATA // 2) % DATA][second::accumulate][:half],
        )
        for i in range(DATA)
    ]


RIGHT = {
    "mean": (mean_loss, lambda y: np.mean(y**2)),
    "sum": (sum_loss, lambda y: np.sum(y**2)),
    "max": (max_loss, np.max),
}


@pytest.mark.parametrize(
    ("name", "accumulate"), [("mean", 1), ("max", 1), ("max", 2), ("sum", 2)]
)
def test_values_are_numpys_for_rows_and_for_their_halves(name, accumulate, make_checks):
    loss_fn, right = RIGHT[name]
    engine, checks = make_checks(loss_fn, accumulate=accumulate)
    got = called(engine, checks["loss_fn"].compare)
    assert list(got) == ["loss"]  # A Sum is no mean, and not compared.
    pairs = halves_of(outputs(engine), accumulate)
    rows = [right(np.concatenate(pair)) for pair in pairs]
    halves = [np.mean([right(half) for half in pair]) for pair in pairs]
    np.testing.assert_allclose(got["loss"], [rows, halves], rtol=1e-5)


def test_noise_changes_the_parameters_of_both(make_checks):
    engine, checks = make_checks(mean_loss)
    still, moved = (called(engine, checks["loss_fn"].compare, x) for x in (0.0, 0.1))
    assert not np.allclose(still["loss"], moved["loss"], rtol=1e-3)
    np.testing.assert_allclose(*moved["loss"], rtol=1e-5)


def test_whole_shows_the_engines_number_beside_that_of_the_batch(make_checks):
    engine, checks = make_checks(sum_loss)
    engines, batchs = called(engine, checks["loss_fn"].whole)["loss"]
    total = np.sum(outputs(engine) ** 2)
    assert batchs == pytest.approx(total, rel=1e-5)
    assert engines == pytest.approx(total / DATA, rel=1e-5)


def test_whole_batch_is_not_compared_where_it_may_not_fit(make_checks):
    _, checks = make_checks(mean_loss, accumulate=2)
    assert checks["loss_fn"].whole is None


def test_both_losses_are_checked_each_in_its_mode(make_checks):
    modes = []

    def loss_fn(model, batch, training):
        modes.append(training)
        return mean_loss(model, batch)

    engine, checks = make_checks(loss_fn, eval_fn=loss_fn)
    assert [checks[name].argument for name in ("loss_fn", "eval_fn")] == [*checks]
    for name, mode in (("loss_fn", True), ("eval_fn", False)):
        modes.clear()
        called(engine, checks[name].compare)
        assert set(modes) == {mode}


def test_evaluation_does_not_accumulate(make_checks):
    engine, checks = make_checks(sum_loss, eval_fn=max_loss, accumulate=2)
    got = called(engine, checks["eval_fn"].compare)
    rows = [np.max(pair) for pair in halves_of(outputs(engine), 1)]
    np.testing.assert_allclose(got["loss"][0], rows, rtol=1e-5)


@pytest.mark.parametrize(
    "change", [{"check_loss": False}, {"coupled_batch": True}], ids=str
)
def test_loss_with_a_reason_is_not_checked(change, make_checks):
    _, checks = make_checks(mean_loss, **change)
    assert type(checks["loss_fn"]) is NoCheck


@pytest.mark.parametrize(
    ("rows", "tolerance"), [(ROWS, TOLERANCE), (DATA, HALF_TOLERANCE)]
)
def test_half_precision_is_checked_in_fp32_where_that_fits(
    rows, tolerance, make_checks
):
    """A single row on a shard is checked with its neighbour's: twice the bytes."""
    given = {
        "model": lambda rngs: nnx.Linear(12, 2, rngs=rngs),
        "precision": "bf16",
        "sample_batch": {"x": X[:rows]},
    }

    def loss_fn(model, batch):
        out = model(jnp.tile(batch["x"].astype(model.kernel.dtype), (1, 4)))
        return jnp.mean(out @ jnp.ones((2, 1), out.dtype))

    _, checks = make_checks(loss_fn, **given)
    assert checks["loss_fn"].tolerance == tolerance
