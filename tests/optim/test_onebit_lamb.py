"""Is a step that of LAMB, and later of 1-bit LAMB, and are wrong numbers refused?

How momenta are exchanged is in tests/equivalence/test_onebit_lamb.py: here the update
gets those of a simulation in NumPy.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import tree
from jaxpar.optim import UpdateSpec, onebit_lamb
from jaxpar.sharding.leaf_sharding import LeafSharding
from tests.optim.numpy_onebit import NumpyOneBitLamb

RATE, FREEZE, STEPS = 1e-2, 4, 24
NO_BOUNDS = (0.0, math.inf)


def first_params() -> dict[str, np.ndarray]:
    """Leaves whose trust ratios are far apart; "stack" has two layers."""
    rng = np.random.default_rng(0)
    sizes = {"stack": 1.0, "huge": 100.0, "small": 1e-4, "zero": 0.0, "idle": 1.0}
    return {
        name: (size * rng.normal(size=(2, 3, 4))).astype(np.float32)
        for name, size in sizes.items()
    }


def gradients(scale: Callable[[int], float]) -> list[dict[str, np.ndarray]]:
    """By step; "idle" never has one."""
    rng, found = np.random.default_rng(1), []
    for number in range(STEPS):
        grads = {n: rng.normal(size=x.shape) for n, x in first_params().items()}
        grads["idle"] *= 0
        found.append({n: np.float32(scale(number) * x) for n, x in grads.items()})
    return found


def steps_of(optimizer: Any, compresses: bool) -> Callable:
    """The optimizer's step, compiled: `(before, grads) -> after`."""
    return jax.jit(
        lambda before, grads: optimizer.step(
            before, grads, jnp.float32(RATE), compresses
        )
    )


def begin(optimizer: Any, more: Any = ()) -> Any:
    params = jax.tree.map(jnp.asarray, first_params() | dict(more))
    return params, optimizer.init(params)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("compresses", [True, False])
def test_without_bounds_the_warm_up_is_that_of_optax(weight_decay, compresses) -> None:
    """And with one data shard, every step."""
    optimizer = onebit_lamb(
        RATE,
        STEPS if compresses else FREEZE,
        weight_decay=weight_decay,
        coeff_bounds=NO_BOUNDS,
    )
    more = {"empty": np.zeros((0, 4), np.float32), "scalar": np.float32(0.5)}
    step, state = steps_of(optimizer, compresses), begin(optimizer, more)
    plain = optax.lamb(RATE, weight_decay=weight_decay)
    params, other = state[0], plain.init(state[0])
    update = jax.jit(plain.update)
    for grads in gradients(lambda _: 1.0):
        grads |= more
        state = step(state, grads)
        updates, other = update(grads, other, params)
        params = optax.apply_updates(params, updates)
        for name, right in params.items():
            np.testing.assert_allclose(state[0][name], right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("scale", "weight_decay", "end"),
    [
        (lambda n: 1.0 if n < FREEZE else 30.0, 0.0, 0.5),
        (lambda n: 1.0 if n < FREEZE else 1e-2, 0.0, 4.0),
        (lambda n: 1.0 if n < FREEZE else 1e-2, 0.1, None),
    ],
)
def test_both_phases_and_their_bounds_are_those_of_numpy(
    scale, weight_decay, end
) -> None:
    """Gradients that grow make factors small, and such that fade make them large."""
    rates = {"b1": 0.8, "b2": 0.9}
    optimizer = onebit_lamb(RATE, FREEZE, weight_decay=weight_decay, **rates)
    step, state = steps_of(optimizer, True), begin(optimizer)
    rates |= {"wd": weight_decay, "lr": RATE}
    right = NumpyOneBitLamb(first_params(), 1, FREEZE, **rates)
    parts = {"nu": "nu", "nu_fresh": "fresh", "coeff": "coeff", "last_factor": "last"}
    for number, grads in enumerate(gradients(scale)):
        right.step([grads])
        # The momentum, as the reduction returns it.
        state = step(state, right.mu if number >= FREEZE else grads)
        for name, p in right.params.items():
            np.testing.assert_allclose(state[0][name], p, rtol=2e-6, atol=2e-6)
            for part, own in parts.items():
                found, expected = getattr(state[1], part), getattr(right, own)
                np.testing.assert_allclose(
                    found[name], expected[name], rtol=1e-4, atol=1e-9
                )
    if end is not None:
        means = right.coeff["huge"], right.coeff["small"]
        assert means == pytest.approx([x * (1 - 0.9**FREEZE) for x in (10.0, 0.01)])
        assert right.last["stack"] == pytest.approx(end)


def test_own_bounds_and_decays_are_those_of_numpy() -> None:
    """A factor begins at 1, and comes to its bounds in small steps."""
    own = {"coeff_bounds": (0.2, 0.7), "factor_bounds": (1.2, 1.3), "coeff_beta": 0.5}
    optimizer = onebit_lamb(RATE, FREEZE, **own, factor_threshold=0.02)
    step, state = steps_of(optimizer, True), begin(optimizer)
    limits = {"coeff": (0.2, 0.7), "factor": (1.2, 1.3), "b3": 0.5, "change": 0.02}
    right = NumpyOneBitLamb(first_params(), 1, FREEZE, **limits)
    for number, grads in enumerate(gradients(lambda _: 1.0)):
        right.step([grads])
        state = step(state, right.mu if number >= FREEZE else grads)
    for name, p in right.params.items():
        np.testing.assert_allclose(state[0][name], p, rtol=1e-5, atol=2e-6)
        assert float(state[1].last_factor[name]) == pytest.approx(right.last[name])


def test_the_state_is_frozen_by_its_count_on_any_number_of_shards() -> None:
    """A run may go on from one data shard on several ones, and back."""
    optimizer = onebit_lamb(RATE, FREEZE)
    alone, states = steps_of(optimizer, False), [begin(optimizer)]
    for grads in gradients(lambda _: 1.0):
        states.append(alone(states[-1], grads))
    frozen, last = states[FREEZE][1], states[-1][1]
    for name in first_params():
        np.testing.assert_array_equal(last.nu[name], frozen.nu[name])
        np.testing.assert_array_equal(last.coeff[name], frozen.coeff[name])
        assert float(last.last_factor[name]) == 1.0
    assert not np.allclose(last.nu_fresh["stack"], frozen.nu_fresh["stack"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"freeze_step": 0}, "freeze_step=0 must be at least 1"),
        ({"b1": 1.0}, "b1=1.0 must be from 0 to below 1"),
        ({"b2": -0.1}, "b2=-0.1 must be from 0 to below 1"),
        ({"coeff_beta": math.nan}, "coeff_beta=nan must be from 0 to below 1"),
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        (
            {"coeff_bounds": (1.0, 0.5)},
            r"coeff_bounds=\(1.0, 0.5\) must be two numbers",
        ),
        ({"coeff_bounds": (0.0, 0.0)}, "and not both 0"),
        ({"factor_bounds": (-1.0, 4.0)}, r"factor_bounds=\(-1.0, 4.0\) must be two"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0"),
        ({"factor_threshold": -0.1}, "factor_threshold=-0.1 must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        onebit_lamb(1e-3, **({"freeze_step": 5} | given))


def test_the_state_has_lamb_s_names_and_more() -> None:
    params = {"w": jnp.ones(3)}
    own = tree.named_leaves(onebit_lamb(1e-3, 5).init(params))
    plain = tree.named_leaves(optax.scale_by_adam().init(params))
    assert set(own) - set(plain) == {"nu_fresh/w", "coeff/w", "last_factor/w"}
    assert set(plain) <= set(own)


@pytest.mark.parametrize("shape", [(), (1, 1), (2,)])
def test_a_leaf_of_one_element_is_named_in_a_note(shape: tuple[int, ...]) -> None:
    """How far one moves in the warm-up is as in optax: "scalar", above."""
    optimizer, params = onebit_lamb(0.1, 1), {"scale": jnp.ones(shape)}
    none = (None,) * len(shape), None, ((),) * len(shape)
    leaf = LeafSharding("scale", shape, *none, {"data": 2}, "")
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=2), jax.devices()[:2])
    state = jax.eval_shape(optimizer.init, params)
    spec = UpdateSpec((leaf,), mesh, params, state, jnp.float32)
    said = optimizer.make_update(spec).notes()
    assert len(said) == (math.prod(shape) == 1)
    assert all("scale (1 in all) have one element" in x for x in said)
