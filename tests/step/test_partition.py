"""Which collectives does a partition use, and in which dtypes is computed?"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxpar.mesh import MeshShape
from jaxpar.optim import ZeroPlusPlus
from jaxpar.sharding.collectives import AutomaticCollectives, ManualCollectives
from jaxpar.sharding.quantized import QuantizedCollectives
from jaxpar.sharding.zero import shard_leaves, zero_stage
from jaxpar.step.precision import make_precision
from tests.step.linear import make_partition


@pytest.mark.parametrize(
    ("shape", "coupled", "kind"),
    [
        (MeshShape(data=1), False, AutomaticCollectives),
        (MeshShape(data=4), True, AutomaticCollectives),
        (MeshShape(data=4), False, ManualCollectives),
    ],
)
def test_data_is_manual_unless_it_is_coupled_or_alone(shape, coupled, kind):
    partition, _ = make_partition(shape, 1, coupled=coupled)
    assert isinstance(partition.collectives, kind)
    assert partition.automatic == (kind is AutomaticCollectives)
    body = object.__repr__
    assert (partition.mapped(body, out_specs=None) is body) == partition.automatic


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_frozen_leaves_are_computed_on_in_their_own_dtype_unless_it_is_wider(zero):
    """At stage 3 they are cast where they are used, so the stored ones stay."""
    partition, params = make_partition(MeshShape(data=1), zero)
    frozen = [jnp.zeros((4, 4), dtype) for dtype in ("int8", "bfloat16", "float32")]
    structs = {str(x.dtype): jax.eval_shape(lambda x=x: x) for x in frozen}
    whole = {name: (None, None) for name in structs}
    leaves = shard_leaves(structs, whole, zero_stage(zero), partition.mesh.shape)
    partition = dataclasses.replace(
        partition, frozen=tuple(leaves.values()), precision=make_precision("bf16")
    )
    given = [*jax.tree.leaves(params), *frozen]
    prepared = jax.eval_shape(partition.prepare, given)
    found = [str(x.dtype) for x in prepared[len(given) - 3 :]]
    used = "float32" if zero == 3 else "bfloat16"
    assert found == ["int8", "bfloat16", used]

    def kinds(leaves: list) -> list:
        assert [str(x.dtype) for x in leaves[-3:]] == ["int8", "bfloat16", "bfloat16"]
        return [jnp.zeros(())]

    def call(shards: list) -> list:
        prepared = partition.prepare(shards)
        own = partition.differentiated(shards, prepared)
        return partition.call(kinds, own, prepared)

    jax.eval_shape(call, given)


def test_codes_are_for_stages_that_ask_for_them():
    partition, _ = make_partition(MeshShape(data=4), 1)
    plain = zero_stage(ZeroPlusPlus(3, weight_bits=None, gradient_bits=None))
    same = dataclasses.replace(partition, zero=plain)
    assert type(same.collectives) is ManualCollectives
    coded = zero_stage(ZeroPlusPlus(3, weight_bits=None, gradient_bits=4))
    found = dataclasses.replace(partition, zero=coded).collectives
    assert isinstance(found, QuantizedCollectives)
    assert found.weights is None
    assert found.gradients == coded.gradients
