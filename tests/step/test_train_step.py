"""What does a step do with gradients: against NumPy, with plain SGD."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.optim.optax_update import OptaxUpdate
from jaxpar.step import loss_scale
from jaxpar.step.carried import Carried
from jaxpar.step.loss import Sums
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import make_train_step
from jaxpar.step.weighted import Sum, Weighted

PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.float32(-1.0)}
GRADS = {"a": np.array([3.0, 0.0], np.float32), "b": np.float32(4.0)}
RATE, NORM = 0.5, 5.0


def make_state() -> TrainState:
    return TrainState(
        step=jnp.int32(7),
        params=PARAMS,
        frozen={},
        model_state={"mean": jnp.float32(1)},
        opt_state=optax.sgd(RATE).init(PARAMS),
        key=jax.random.key(3),
        carried={"loss_scale": loss_scale.init_loss_scale()},
    )


def take(
    grads: Any = None,
    weight: float = 2.0,
    clip_norm: float | None = None,
    *,
    scales_loss: bool = False,
    seen: dict | None = None,
    parts: Sequence[Carried] = (),
) -> tuple[TrainState, Any]:
    """One step whose gradients are given; their other arguments go to `seen`."""

    def gradients(params, model_state, inputs, key, scale, carry):
        if seen is not None:
            seen.update(step=inputs.step.value, key=key, scale=scale)
        scaled = jax.tree.map(
            lambda x: (x * scale).astype(x.dtype), GRADS if grads is None else grads
        )
        sums = Sums(
            Weighted(jnp.float32(6), jnp.float32(weight)), {"n": Sum(jnp.float32(8))}
        )
        return scaled, sums, {"mean": model_state["mean"] + 1}, carry

    update = OptaxUpdate(optax.sgd(RATE), (), 1)
    carried = [loss_scale.LossScaler(scales_loss), *parts]
    step = make_train_step(
        gradients, update, carried, clip_norm=clip_norm, scales_loss=scales_loss
    )
    return step(make_state(), {"x": jnp.ones(1)})


def assert_moved(state: TrainState, factor: float) -> None:
    for name, grad in GRADS.items():
        right = np.asarray(PARAMS[name]) - RATE * factor * grad
        np.testing.assert_allclose(state.params[name], right, rtol=1e-6)


@pytest.mark.parametrize("scales_loss", [False, True])
def test_step_moves_parameters_by_the_gradients_whatever_the_scale(scales_loss):
    state, metrics = take(scales_loss=scales_loss)
    assert_moved(state, 1.0)
    assert (int(state.step), float(state.model_state["mean"])) == (8, 2)
    assert float(metrics["grad_norm"]) == pytest.approx(NORM)
    assert float(metrics["loss_scale"]) == (loss_scale.START if scales_loss else 1)
    assert {name: float(metrics[name]) for name in ("loss", "n", "skipped")} == {
        "loss": 3,
        "n": 8,
        "skipped": 0,
    }


@pytest.mark.parametrize("scales_loss", [False, True])
@pytest.mark.parametrize(
    ("clip_norm", "factor"), [(2.0, 2.0 / NORM), (5.0, 1.0), (50.0, 1.0)]
)
def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported(
    clip_norm, factor, scales_loss
):
    state, metrics = take(clip_norm=clip_norm, scales_loss=scales_loss)
    assert_moved(state, factor)
    assert float(metrics["grad_norm"]) == pytest.approx(NORM)


@pytest.mark.parametrize(
    "change",
    [
        {"grads": GRADS | {"b": np.float32(np.nan)}},
        {"grads": GRADS | {"b": np.float32(np.inf)}},
        {"grads": GRADS | {"b": np.float32(1e38)}},
        {"weight": 0.0},
    ],
    ids=["nan", "inf", "norm overflows", "no weight"],
)
def test_step_that_can_not_be_applied_changes_only_the_counters(change):
    state, metrics = take(**change)
    assert_moved(state, 0.0)
    assert (int(state.step), float(state.model_state["mean"])) == (8, 1)
    assert int(metrics["skipped"]) == 1
    assert state.key == make_state().key


def test_norm_of_half_precision_gradients_is_taken_in_fp32():
    """300 squared is more than fp16 has."""
    half = {name: jnp.full((2,), 300, jnp.float16) for name in PARAMS}
    half["b"] = jnp.float16(0)
    _, metrics = take(half)
    assert float(metrics["grad_norm"]) == pytest.approx(300 * 2**0.5)


def test_gradients_get_the_steps_number_and_a_key_of_its_own():
    seen: dict[str, Any] = {}
    take(seen=seen)
    assert seen["step"] == 7
    assert seen["key"] == jax.random.fold_in(make_state().key, 7)
    assert seen["scale"] == 1
