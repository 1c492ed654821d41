"""Are numbers that can't be refused, and what is carried said?

How it trains is in tests/equivalence/test_quantized_reduction.py.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.optim import QuantizedReduction
from jaxpar.sharding.zero import shard_leaves, zero_stage


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bits": 2}, "bits=2 must be 8 or 4"),
        ({"block": 7}, "block=7 must be even, and at least 8"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QuantizedReduction(**given)


def test_errors_are_carried_with_feedback_alone() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    leaf = shard_leaves(shapes, {"w": (None, None)}, zero_stage(1), {"data": 2})["w"]
    carry = QuantizedReduction(8).init([leaf])
    assert carry[leaf.name].shape == (8, 4)
    assert not jnp.any(carry[leaf.name])
    assert QuantizedReduction(8, feedback=False).init([leaf]) == ()
