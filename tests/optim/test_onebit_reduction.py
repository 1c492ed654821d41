"""Does the reduction of 1-bit Adam carry and send what it says?

What it computes is in tests/equivalence/test_onebit_adam.py.
"""

import jax
import pytest

import jaxpar
from jaxpar.optim import Wire, onebit_adam
from jaxpar.optim.onebit_reduction import OneBitMomentum
from tests.equivalence.perceptron import make_engine


def engine(tensor: int, zero: int) -> jaxpar.Engine:
    return make_engine(onebit_adam(1e-2, 3), 4, tensor, zero)


def test_a_device_has_a_momentum_and_an_error_whole_and_a_chunk_s() -> None:
    made = engine(2, 1)
    carry = made.placement.packed.carried["reduction"]

    def shard(part: str, name: str) -> tuple[int, ...]:
        struct = carry[part][name]
        return struct.sharding.shard_shape(struct.shape)

    # Split over tensor, 16 x 64 in a momentum; a chunk has a quarter of that.
    assert shard("momentum", "up/kernel") == shard("worker", "up/kernel") == (1, 16, 32)
    assert shard("server", "up/kernel") == (1, 1, 16 * 32 // 4)
    assert shard("server", "out/bias") == (1, 1, 8)


@pytest.mark.parametrize("tensor", [1, 2])
def test_signs_and_scales_are_counted(tensor: int) -> None:
    made = engine(tensor, 0)
    leaves = made.placement.trained
    wire = Wire(made.placement.mesh.shape, 4)
    sent = OneBitMomentum(3, 0.9).communicated(leaves, wire)["data"]
    pieces = [16 * 64 // tensor, 64 * 8, 64 // tensor, 8]
    bits = sum(-(-size // 32) * 32 // 8 for size in pieces)
    assert sent["all-to-all"] <= bits + 4 * 4 * 4 + 64 * (tensor - 1)
    assert sent["all-to-all"] == sent["all-gather"]
    made.verify()


def test_a_momentum_begins_as_the_optimizer_s() -> None:
    made = engine(1, 1)
    state = made.state
    ones = jax.tree.map(lambda x: x + 1, state.opt_state)
    leaves = tuple(made.placement.trained)
    carry = OneBitMomentum(3, 0.9).begin(leaves, ones)
    assert int(carry["count"]) == 1
    assert all((x == 1).all() for x in carry["momentum"].values())
    assert not any(x.any() for x in carry["worker"].values())
