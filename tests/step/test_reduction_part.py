"""Is what a reduction carries placed as its leaves are, and kept by skipped steps?"""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.optim import PlainReduction
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.carried import Stepped
from jaxpar.step.reduction_part import ReductionPart, reduction_parts
from tests.optim.int8_reduction import Int8Reduction

SIZES = {"replica": 2, "data": 4, "expert": 1, "pipe": 1, "tensor": 2}


def leaf(name: str, shape: tuple, placed: tuple, data_dim: int | None) -> LeafSharding:
    compute = tuple(axes[0] if axes else None for axes in placed)
    over = ("replica", "data")
    return LeafSharding(name, shape, compute, data_dim, placed, SIZES, "", over)


SPLIT = leaf("w", (64, 16), ((), ("tensor",)), 0)
KEPT = leaf("b", (6,), ((),), None)


def test_carried_arrays_are_sharded_as_the_views_of_their_leaves():
    (part,) = reduction_parts(Int8Reduction(), [SPLIT, KEPT])
    assert (part.name, part.per_shard, part.saved) == ("reduction", True, True)
    assert part.spec("w", (64, 16)) == P(None, "tensor")
    assert part.spec("errors/w", (64, 16)) == P(None, "tensor")
    assert part.spec("w", (64,)) == part.spec("other", (64, 16)) == P()
    assert reduction_parts(PlainReduction(), [SPLIT]) == ()
    assert isinstance(part, ReductionPart)


@pytest.mark.parametrize("applied", [True, False])
def test_what_is_carried_changes_with_steps_that_are_applied(applied):
    (part,) = reduction_parts(Int8Reduction(), [KEPT])
    yes, applied_or_not = jnp.bool_(True), jnp.bool_(applied)
    happened = {"finite": yes, "applied": applied_or_not, "skipped": ~applied_or_not}
    stepped = Stepped({}, {}, **happened, carry={part.name: {"b": jnp.ones(6)}})
    after = part.after({"b": jnp.zeros(6)}, stepped)
    assert float(after["b"][0]) == applied
