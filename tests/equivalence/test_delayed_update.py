"""Do updates that are a step late train as a simulation of the delay?"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from tests.equivalence.perceptron import batches, make_engine
from tests.equivalence.problems import distance

ADAM, AFTER = optax.adamw(1e-2), 2


def offload(**change: Any) -> jaxpar.Offload:
    given = {"update": "host", "piece_mb": 0.0002, "delayed": True}
    return jaxpar.Offload(**{**given, "delay_after": AFTER, **change})


def engine_of(zero: int = 3, precision: str = "bf16", **change: Any) -> jaxpar.Engine:
    given = {"offload": offload(), "clip_norm": 0.5, **change}
    return make_engine(ADAM, 4, 2, zero, precision=precision, **given)


def many(steps: int) -> list[dict]:
    return [batches()[step % len(batches())] for step in range(steps)]


def simulated(steps: list[dict], params: Any, after: int) -> tuple[list[float], Any]:
    """A plain loop in bf16, whose gradients wait for a step from a step on."""

    def loss_of(params: Any, batch: dict) -> jax.Array:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        up, out = half["up"], half["out"]
        x = batch["x"].astype(jnp.float32)
        hidden = jnp.tanh(x @ up["kernel"] + up["bias"])
        made = hidden @ out["kernel"] + out["bias"]
        return jnp.mean((made - batch["y"]) ** 2)

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, 0.5 / optax.tree.norm(grads))
        grads = jax.tree.map(lambda g: g * factor, grads)
        changes, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    compute = jax.jit(jax.value_and_grad(loss_of))
    state, pending, losses = ADAM.init(params), None, []
    for step, batch in enumerate(steps):
        loss, grads = compute(params, batch)
        losses.append(float(loss))
        late = pending if step >= after else grads
        if late is not None:
            params, state = update(params, state, late)
        pending = grads if step >= after else None
    return losses, params


@pytest.mark.parametrize(
    ("zero", "accumulate"),
    [
        (3, 1),
        *(pytest.param(z, a, marks=pytest.mark.thorough) for z, a in [(1, 2), (0, 1)]),
    ],
)
def test_trains_as_the_simulated_delay(zero: int, accumulate: int) -> None:
    """The two sum in other orders in bf16, which Adam makes 2e-3 of the parameters.

    With the delay at other steps they would be five to nine times further apart.
    """
    engine = engine_of(zero, accumulate=accumulate)
    first = jax.device_get(engine.state.params)
    steps = many(12)
    losses = [float(engine.step(batch)["loss"]) for batch in steps]
    right = simulated(steps, first, AFTER)
    found = jax.device_get(engine.state.params)
    np.testing.assert_allclose(losses, right[0], rtol=1e-3)
    apart = distance(found, right[1])
    assert apart <= 5e-3
    for other in (0, AFTER + 1, len(steps)):
        assert distance(found, simulated(steps, first, other)[1]) > 4 * apart


def test_after_saving_nothing_is_pending(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint is the one that saved it, to the bit."""
    engine = engine_of()
    for batch in many(5):
        engine.step(batch)
    before = jax.device_get(engine.state.params)
    engine.save(tmp_path)
    engine.wait()
    assert distance(jax.device_get(engine.state.params), before) > 1e-4
    other = engine_of()
    for batch in many(4):
        other.step(batch)  # What is pending here is forgotten.
    assert other.restore(tmp_path) == 5
    for batch in many(4):
        losses = [float(each.step(batch)["loss"]) for each in (engine, other)]
        assert losses[0] == losses[1]
    states = [
        jax.device_get((x.state.params, x.state.opt_state)) for x in (engine, other)
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_skipped_steps_change_nothing_and_the_next_goes_on() -> None:
    engine = engine_of(precision="fp16")
    for batch in many(4):
        engine.step(batch)
    bad = {name: np.full_like(x, np.inf) for name, x in batches()[0].items()}
    engine.step(bad)
    before = jax.device_get(engine.state.params)
    metrics = engine.step(batches()[0])  # The bad gradients are those that are late.
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, before, engine.state.params)
    engine.step(batches()[1])
    assert distance(jax.device_get(engine.state.params), before) > 1e-5


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"update": "device"}, {}, "delayed=True needs optimizer='host'"),
        ({"delay_after": -1}, {}, "delay_after=-1 must be at least 0"),
        ({}, {"precision": "fp32"}, "delayed=True needs precision='bf16' or 'fp16'"),
    ],
)
def test_what_a_delay_can_t_be_is_refused(change, options, said) -> None:
    with pytest.raises(ValueError, match=said):
        engine_of(offload=offload(**change), **options)


def test_a_step_of_a_state_of_one_s_own_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match=r"train_step: with Offload\(delayed=True\)"):
        engine.train_step(engine.state, batches()[0])
