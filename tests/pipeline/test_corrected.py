"""Is PipeMare's average of updates by block, and does it end with what is under way?

Training is compared in tests/equivalence/test_asynchronous.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pipeline.corrected import MeanUpdate
from jaxpar.step.carried import Stepped


def test_average_of_updates_is_by_block_and_ends_with_what_is_under_way():
    weights = {"a": np.float32([0.5]), "b": np.float32([[0.0], [0.75]])}
    part = MeanUpdate(weights)
    before = {"a": jnp.zeros(2), "b": jnp.zeros((2, 3))}
    after = jax.tree.map(lambda x: x + 1, before)

    def stepped(*, applied: bool, is_there: bool) -> Stepped:
        yes, flight = jnp.bool_(True), Flight(jnp.array([[is_there]]))
        own = jnp.bool_(applied)
        return Stepped(after, before, yes, own, ~own, {"in_flight": flight})

    mean = part.after(part.init(before), stepped(applied=True, is_there=True))
    np.testing.assert_allclose(mean["a"], 0.5)
    np.testing.assert_allclose(mean["b"], [[1.0] * 3, [0.25] * 3])
    same = part.after(mean, stepped(applied=False, is_there=True))
    np.testing.assert_array_equal(same["a"], mean["a"])
    gone = part.after(mean, stepped(applied=True, is_there=False))
    assert not any(np.any(x) for x in jax.tree.leaves(gone))


class Flight:
    """What `MeanUpdate` reads of what is under way."""

    def __init__(self, is_there: jax.Array):
        self.is_there = is_there
