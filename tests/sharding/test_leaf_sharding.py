"""What does a shard of the batch axes see of a leaf, and over what is it reduced?"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import Spec
from jaxpar.sharding.zero import shard_leaves, zero_stage

SIZES = MeshShape(data=2, tensor=2, replica=2, expert=2).axes


def leaf(shape: tuple[int, ...], compute: Spec, zero: int = 3) -> LeafSharding:
    structs = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return shard_leaves(structs, {"w": compute}, zero_stage(zero), SIZES)["w"]


def test_leaf_is_stored_in_every_replica_and_reduced_between_them():
    own = leaf((64, 32), (None, "tensor"))
    assert own.stored_spec == P(("data", "expert"), "tensor")
    assert own.ways_stored == 8
    assert own.reduced_inside == ("data", "expert")
    assert own.reduced_between == ("replica",)
    assert own.on_shard == own


def test_small_leaf_is_reduced_over_all_batch_axes_at_once():
    own = leaf((6,), (None,))
    assert own.stored_spec == P(None)
    assert own.reduced_inside == ("replica", "data", "expert")
    assert own.reduced_between == ()


def test_expert_leaf_is_split_over_experts_and_not_reduced_over_them():
    own = leaf((4, 64, 32), ("expert", None, "tensor"))
    assert own.stored_spec == P("expert", "data", "tensor")
    assert own.reduced_inside == ("data",)
    assert own.reduced_between == ("replica",)
    assert own.batch_spec == P("expert", "data", None)
    seen = own.on_shard
    assert (seen.shape, seen.compute) == ((2, 64, 32), (None, None, "tensor"))
    assert seen.placed == ((), (), ("tensor",))
    assert seen.reduced_inside == ("data",)


@pytest.mark.parametrize("zero", range(4))
def test_expert_leaf_is_split_over_experts_at_every_stage(zero):
    own = leaf((4, 64, 32), ("expert", None, None), zero)
    assert own.stored_spec[0] == "expert"
    assert own.ways_computed == 2


def test_data_never_shares_the_dim_of_experts():
    """A shard of the rows sees its experts as a piece, not as a view of two dims."""
    own = leaf((512, 3), ("expert", None))
    assert own.data_dim is None
    assert own.stored_spec == P(("expert", "tensor"), None)
    assert own.on_shard.placed == (("tensor",), ())
