"""Are schedules their formulas, at every step, and does an engine follow them?"""

import math

import jax
import numpy as np
import optax
import pytest

from jaxpar.optim import (
    lr_range_test,
    one_cycle,
    one_cycle_momentum,
    warmup_then,
)
from tests.equivalence.perceptron import (
    STEPS,
    batches,
    first_params,
    loss_of,
    make_engine,
)

RTOL = 1e-6
"""Schedules are computed in fp32, of numbers without cancellation near 0."""


def values(schedule: optax.Schedule, steps: int) -> np.ndarray:
    """At each step, traced; and of an integer the same."""
    found = jax.jit(jax.vmap(schedule))(np.arange(steps))
    assert found.dtype == np.float32
    one = schedule(3)
    assert isinstance(one, jax.Array)
    assert one.shape == ()
    np.testing.assert_allclose(one, found[3], rtol=RTOL)
    return np.asarray(found)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test_rises_by_its_rate(staircase: bool) -> None:
    found = values(lr_range_test(2e-3, 7, step_rate=1.5, staircase=staircase), 30)
    interval = np.arange(30) / 7
    interval = np.floor(interval) if staircase else interval
    np.testing.assert_allclose(found, 2e-3 * (1 + 1.5 * interval), rtol=RTOL)


def test_range_test_by_default_doubles_in_2000_steps() -> None:
    assert float(lr_range_test()(2000)) == pytest.approx(2e-3)


def cycled(ends: float, turn: float, first: int, second: int, decay: float) -> list:
    """A cycle and 20 steps of decay."""
    up = [ends + (turn - ends) * step / first for step in range(first)]
    down = [turn + (ends - turn) * step / second for step in range(second)]
    return [*up, *down, *(ends / (1 + decay * step) for step in range(20))]


@pytest.mark.parametrize(("first", "second"), [(5, None), (5, 9), (1, 1)])
def test_cycle_rises_falls_and_decays(first: int, second: int | None) -> None:
    steps = {"first_steps": first, "second_steps": second, "decay_steps": 4}
    halves = first, second or first
    rate = values(one_cycle(0.01, 0.2, **steps, decay_rate=0.5), sum(halves) + 20)
    np.testing.assert_allclose(rate, cycled(0.01, 0.2, *halves, 0.125), rtol=RTOL)
    schedule = one_cycle_momentum(0.7, 0.95, **steps, decay_rate=0.1)
    momentum = values(schedule, sum(halves) + 20)
    np.testing.assert_allclose(momentum, cycled(0.95, 0.7, *halves, 0.025), rtol=RTOL)


def test_cycle_by_default_is_2000_steps_each_way_and_constant_after_it() -> None:
    rate, momentum = one_cycle(1e-3, 1e-2), one_cycle_momentum()
    steps = np.array([0, 1000, 2000, 3000, 4000, 9000])
    right = [1e-3, 5.5e-3, 1e-2, 5.5e-3, 1e-3, 1e-3]
    np.testing.assert_allclose(rate(steps), right, rtol=RTOL)
    right = [0.9, 0.85, 0.8, 0.85, 0.9, 0.9]
    np.testing.assert_allclose(momentum(steps), right, rtol=RTOL)


def warmed(decay: str, step: int, warmup: str = "linear") -> float:
    """10 steps from 0.05 to 0.4, and then 30 to 0.1."""
    start, peak, end, rise, steps = 0.05, 0.4, 0.1, 10, 40
    if step < rise:
        log = math.log(max(step, 1)) / math.log(rise)
        return start + (peak - start) * (step / rise if warmup == "linear" else log)
    done = min((step - rise) / (steps - rise), 1.0)
    return {
        "cosine": end + (peak - end) * (1 + math.cos(math.pi * done)) / 2,
        "linear": peak + (end - peak) * done,
        "inverse_sqrt": max(peak * math.sqrt(rise / step), end),
        "wsd": peak + (end - peak) * min(max(step - 28, 0) / 12, 1.0),
    }[decay]


@pytest.mark.parametrize("decay", ["cosine", "linear", "inverse_sqrt", "wsd"])
@pytest.mark.parametrize("warmup", ["linear", "log"])
def test_rate_warms_up_and_decays(decay, warmup) -> None:
    given = {"steps": 40, "warmup_steps": 10, "start": 0.05, "end": 0.1}
    given |= {"decay_steps": 12} if decay == "wsd" else {}
    found = values(warmup_then(decay, 0.4, warmup=warmup, **given), 300)
    right = [warmed(decay, step, warmup) for step in range(300)]
    np.testing.assert_allclose(found, right, rtol=3 * RTOL)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (8, 0), (480, 48)])
def test_cosine_is_that_of_optax_to_the_bit(steps: int, warmup_steps: int) -> None:
    own = warmup_then("cosine", 5e-3, steps=steps, warmup_steps=warmup_steps)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 5e-3, warmup_steps, steps)
    expected = values(theirs, steps + 9)
    np.testing.assert_array_equal(values(own, steps + 9), expected)


@pytest.mark.parametrize("decay", ["cosine", "linear", "inverse_sqrt", "wsd"])
@pytest.mark.parametrize("warmup", ["linear", "log"])
def test_run_without_warm_up_begins_at_its_peak(decay, warmup) -> None:
    schedule = warmup_then(decay, 0.4, steps=9, warmup_steps=0, warmup=warmup)
    assert float(schedule(0)) == pytest.approx(0.4)
    if decay == "inverse_sqrt":
        assert float(schedule(3)) == pytest.approx(0.2)


def test_stable_rate_falls_in_the_last_tenth_or_never() -> None:
    given = {"steps": 200, "warmup_steps": 10, "end": 0.1}
    tenth = values(warmup_then("wsd", 0.4, **given), 202)
    assert (tenth[10:181] == np.float32(0.4)).all()
    np.testing.assert_allclose(tenth[[190, 200, 201]], [0.25, 0.1, 0.1], rtol=RTOL)
    never = values(warmup_then("wsd", 0.4, decay_steps=0, **given), 202)
    assert (never[10:] == np.float32(0.4)).all()
    short = warmup_then("wsd", 0.4, steps=20, warmup_steps=19)
    np.testing.assert_allclose(values(short, 21)[[19, 20]], [0.4, 0.0], rtol=RTOL)


GIVEN = {"steps": 100, "warmup_steps": 10}
WRONG = {
    r"min_rate=0\.0 must be above 0": lambda: lr_range_test(0.0),
    r"min_rate=nan must be above 0": lambda: lr_range_test(math.nan),
    r"step_rate=-1\.0 must be above 0": lambda: lr_range_test(1e-3, step_rate=-1.0),
    r"step_size=0 must be at least 1 step": lambda: lr_range_test(1e-3, 0),
    r"min_rate=-0\.1 must be at least 0": lambda: one_cycle(-0.1, 0.2),
    r"max_rate=0\.1 must be at least min_rate=0\.2": lambda: one_cycle(0.2, 0.1),
    r"first_steps=0 must be at least 1": lambda: one_cycle(0.1, 0.2, first_steps=0),
    r"second_steps=-2 must be at": lambda: one_cycle(0.1, 0.2, second_steps=-2),
    r"decay_steps=-1 must be at least 0": lambda: one_cycle(0.1, 0.2, decay_steps=-1),
    r"decay_rate=-1\.0 must be at": lambda: one_cycle(0.1, 0.2, decay_rate=-1.0),
    r"decay_rate=0\.5: nothing decays": lambda: one_cycle(0.1, 0.2, decay_rate=0.5),
    r"min_momentum=1\.0 must be from 0": lambda: one_cycle_momentum(1.0),
    r"max_momentum=0\.7 must be from min_": lambda: one_cycle_momentum(0.8, 0.7),
    r"max_momentum=1\.1 must be .* below 1": lambda: one_cycle_momentum(0.8, 1.1),
    r"decay='step' must be one of cosine, l": lambda: warmup_then("step", 1, **GIVEN),
    r"warmup='exp' must be": lambda: warmup_then("wsd", 1.0, warmup="exp", **GIVEN),
    r"peak=0\.0 must be above 0": lambda: warmup_then("linear", 0.0, **GIVEN),
    r"start=2\.0 must be": lambda: warmup_then("linear", 1.0, start=2.0, **GIVEN),
    r"end=-1\.0 must be": lambda: warmup_then("linear", 1.0, end=-1.0, **GIVEN),
    r"warmup_steps=-1 must be at least 0": lambda: warmup_then(
        "linear", 1.0, steps=9, warmup_steps=-1
    ),
    r"steps=9 must be above warmup_steps=9: the decay would end before": lambda: (
        warmup_then("linear", 1.0, steps=9, warmup_steps=9)
    ),
    r"decay_steps=91 must be from 0 to the 90 steps after": lambda: warmup_then(
        "wsd", 1.0, decay_steps=91, **GIVEN
    ),
    r"decay_steps=-1 must be from 0": lambda: warmup_then(
        "wsd", 1.0, decay_steps=-1, **GIVEN
    ),
    r'decay_steps=9 is of decay="wsd"; \'linear\' falls': lambda: warmup_then(
        "linear", 1.0, decay_steps=9, **GIVEN
    ),
}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        WRONG[text]()


def test_engine_follows_a_rate_and_a_momentum() -> None:
    cycle = {"first_steps": 2, "second_steps": 3}
    optimizer = optax.inject_hyperparams(optax.sgd)(
        learning_rate=one_cycle(0.05, 0.4, **cycle),
        momentum=one_cycle_momentum(0.5, 0.9, **cycle),
    )
    rates = cycled(0.05, 0.4, 2, 3, 0.0)[:STEPS]
    momenta = cycled(0.9, 0.5, 2, 3, 0.0)[:STEPS]
    engine = make_engine(optimizer, data=2, tensor=1, zero=1)
    params = first_params()
    velocity = jax.tree.map(np.zeros_like, params)
    for batch, rate, momentum in zip(batches(), rates, momenta, strict=True):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        velocity = jax.tree.map(lambda v, g, m=momentum: m * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v, r=rate: p - r * v, params, velocity)
        metrics = engine.step(batch)
        assert float(metrics["learning_rate"]) == pytest.approx(rate, rel=RTOL)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    found = jax.device_get(engine.state.params)
    # Two shards add their gradients in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found,
        jax.device_get(params),
    )
