"""When does 0/1 Adam exchange what, and what does a device carry for it?

What it computes is in tests/equivalence/test_zero_one_adam.py.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.optim import Wire, zero_one_adam
from jaxpar.optim.zero_one_reduction import Rounds
from tests.equivalence.perceptron import make_engine
from tests.optim.numpy_zero_one import rounds


@pytest.mark.parametrize("numbers", [(100, 16, 40, 16), (37, 3, 7, 8), (1, 1, 1, 1)])
def test_rounds_are_those_of_intervals_that_double(numbers) -> None:
    own = Rounds(*numbers)

    def step(counts: jax.Array, _: Any) -> tuple:
        return own.after(counts), own.kind(counts)

    _, found = jax.lax.scan(step, jnp.zeros(3, int), length=400)
    right = itertools.islice(rounds(*numbers), 400)
    assert found.tolist() == [["whole", "signs", "alone"].index(x) for x in right]


def test_a_device_carries_four_arrays_whole_and_sends_signs() -> None:
    made = make_engine(zero_one_adam(1e-2, 3), 4, 2, 1)
    carry = made.placement.packed.carried["reduction"]
    for part in ("momentum", "variance", "moved", "worker"):
        struct = carry[part]["up/kernel"]
        # Split over tensor, 16 x 64.
        assert struct.sharding.shard_shape(struct.shape) == (1, 16, 32)
    reduction = made.placement.update.reduction
    leaves = made.placement.trained
    sent = reduction.communicated(leaves, Wire(made.placement.mesh.shape, 4))["data"]
    assert set(sent) == {"all-to-all", "all-gather"}
    whole = 4 * sum(math.prod(leaf.shape) // leaf.ways_placed for leaf in leaves)
    assert sent["all-to-all"] == sent["all-gather"] < whole / 16
    made.verify()
