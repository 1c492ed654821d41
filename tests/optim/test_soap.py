"""Does SOAP step as its definition says, and which leaves have a basis?"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.optim import soap
from tests.optim.numpy_soap import NumpySoap

GIVEN = {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "every": 5}
STEPS = 24
SHAPES = {
    "square": {"kernel": (6, 6)},
    # Of a gradient [4, 12] the right basis has a null space.
    "wide": {"kernel": (4, 12), "bias": (12,)},
    "stacked": {"kernel": (3, 5, 4), "bias": (3, 4)},
    "table": {"embedding": (40, 4)},
}
MAX_DIM = 16


@functools.cache
def taken() -> tuple[list[dict], list[dict]]:
    """Gradients of 24 steps, each leaf's of other sizes by element; and updates."""
    rng = np.random.default_rng(0)

    def zeros(shape: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(shape)

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(zeros, SHAPES, is_leaf=is_shape)
    sizes = jax.tree.map(lambda x: np.exp(rng.normal(size=x.shape)), params)
    optimizer = soap(1.0, **GIVEN, shampoo_beta=0.8, weight_decay=0.0, max_dim=MAX_DIM)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    grads, updates = [], []
    for _ in range(STEPS):
        own = jax.tree.map(
            lambda x: (x * rng.normal(size=x.shape)).astype(np.float32), sizes
        )
        found, state = update(own, state, params)
        grads.append(own)
        updates.append(jax.device_get(found))
    return grads, updates


@pytest.mark.parametrize(
    ("module", "leaf", "layer", "sides"),
    [
        ("square", "kernel", None, (0, 1)),
        ("wide", "kernel", None, (0, 1)),
        ("wide", "bias", None, ()),
        ("stacked", "kernel", 0, (0, 1)),
        ("stacked", "kernel", 2, (0, 1)),
        # A stack of vectors is not a matrix.
        ("stacked", "bias", None, ()),
        # One dim is above the largest.
        ("table", "embedding", None, (1,)),
    ],
)
def test_steps_are_those_of_the_definition(
    module: str, leaf: str, layer: int | None, sides: tuple[int, ...]
) -> None:
    """24 steps, with four turns of the bases."""
    grads, updates = taken()
    at = ... if layer is None else layer
    shape = grads[0][module][leaf][at].shape
    plain = NumpySoap(shape, **GIVEN, beta=0.8, sides=sides)
    for grad, update in zip(grads, updates, strict=True):
        expected = -plain.update(grad[module][leaf][at].astype(np.float64))
        np.testing.assert_allclose(update[module][leaf][at], expected, atol=2e-4)


def test_without_a_basis_it_is_adam_one_step_late() -> None:
    params: Any = {"kernel": jnp.ones((4, 3))}
    grads: Any = {"kernel": jnp.arange(12.0).reshape(4, 3) - 5.0}
    none = soap(0.1, 0.9, 0.99, eps=1e-8, weight_decay=0.0, max_dim=2)
    adam = optax.adam(0.1, 0.9, 0.99)
    state: Any = none.init(params)
    right_state: Any = adam.init(params)
    found: Any
    right: Any
    first: Any
    first, state = none.update(grads, state, params)
    assert not first["kernel"].any()
    for factor in (1.0, -0.5, 2.0):
        own = jax.tree.map(lambda x, factor=factor: factor * x, grads)
        found, state = none.update(own, state, params)
        right, right_state = adam.update(own, right_state, params)
        np.testing.assert_allclose(found["kernel"], right["kernel"], rtol=1e-5)


def test_parameters_decay_and_a_schedule_is_followed() -> None:
    params = {"kernel": 2.0 * jnp.ones((4, 3))}
    optimizer = soap(lambda step: 0.5 / (1 + step), weight_decay=0.1)
    state = optimizer.init(params)
    updates: Any
    updates, _ = optimizer.update({"kernel": jnp.ones((4, 3))}, state, params)
    np.testing.assert_allclose(updates["kernel"], -0.5 * 0.1 * 2.0, rtol=1e-6)


def test_bases_are_of_matrices_alone() -> None:
    params = jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    made: Any = soap(1e-3, max_dim=MAX_DIM).init(params)
    shapes = jax.tree.map(jnp.shape, made[0].bases)
    assert shapes["stacked"] == {
        "kernel": {"left": (3, 5, 5), "right": (3, 4, 4)},
        "bias": {},
    }
    assert shapes["table"] == {"embedding": {"right": (4, 4)}}
    chosen = {"square": True, "wide": False, "stacked": False, "table": False}
    tree = {
        name: jax.tree.map(lambda _, x=chosen[name]: x, params[name]) for name in params
    }
    made = soap(1e-3, matrices=tree).init(params)
    counts = [len(jax.tree.leaves(made[0].bases[name])) for name in chosen]
    assert counts == [2, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b1": 1.0}, r"b1=1\.0 must be from 0 to below 1\."),
        ({"b2": -0.1}, r"b2=-0\.1 must be from 0 to below 1\."),
        ({"shampoo_beta": 1.5}, r"shampoo_beta=1\.5 must be from 0 to below 1\."),
        ({"eps": -1.0}, r"eps=-1\.0 must be at least 0\."),
        ({"weight_decay": -1.0}, r"weight_decay=-1\.0 must be at least 0\."),
        ({"every": 0}, r"every=0 must be at least 1 step\."),
        ({"max_dim": 0}, r"max_dim=0 must be at least 1\."),
    ],
)
def test_number_out_of_its_range_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soap(1e-3, **given)
