"""Does a leaf in a store read its layers there, and send their gradients?

Where leaves are gathered is tested in tests/step/test_gather_at_use.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.mesh import on_abstract_mesh
from jaxpar.sharding.collectives import AutomaticCollectives
from jaxpar.step.gather_at_use import call_gathering_at_use
from jaxpar.step.gathered_leaf import GatheredAtUse, Gathering
from tests.step.test_gather_at_use import SHAPES, X, make_plans, scanned

STACK = np.random.default_rng(0).normal(size=SHAPES["stack"]).astype(np.float32)


class Traced:
    """A store that is an array; what is written it adds to the result, to be seen."""

    def read(self, position, number, shape):
        return jnp.asarray(STACK)[number].reshape(shape) + 0 * position

    def write(self, position, number, grad):
        return 1000.0 * (number + 1) + 0 * position

    def failure(self):
        return None


def value_and_slots(fn):
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1])
    stack, *others = make_plans(data=1)
    gathering = Gathering(AutomaticCollectives())
    numbers = jnp.arange(SHAPES["stack"][0], dtype=jnp.int32)

    def of_slots(slot):
        leaf = GatheredAtUse(
            stack, slot, numbers, jnp.dtype(jnp.float32), gathering, Traced()
        )
        rest = [
            GatheredAtUse(
                own, None, jnp.ones(own.shape), jnp.dtype(jnp.float32), gathering
            )
            for own in others
        ]
        return call_gathering_at_use(lambda leaves, x: fn(*leaves, x), [leaf, *rest], X)

    with on_abstract_mesh(mesh):
        return jax.jit(jax.value_and_grad(of_slots))(jnp.zeros(numbers.shape))


def test_gradients_are_sums_of_squares_and_layers_are_numbered() -> None:
    value, found = value_and_slots(scanned)
    ones = [jnp.ones(SHAPES[name]) for name in ("head", "bias")]
    right, grads = jax.value_and_grad(scanned)(jnp.asarray(STACK), *ones, X)
    np.testing.assert_allclose(value, right, rtol=1e-5)
    squares = np.sum(np.square(grads), axis=(1, 2)) + 1000.0 * np.arange(1, 4)
    np.testing.assert_allclose(found, squares, rtol=1e-5)


def test_a_leaf_in_a_store_is_not_read_whole() -> None:
    with pytest.raises(ValueError, match="is read whole by this function"):
        value_and_slots(lambda stack, head, bias, x: jnp.sum(stack))
