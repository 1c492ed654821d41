"""Are gradients over shards and micro-batches those of plain JAX on the whole batch?

The tolerance, 1e-5, is for fp32 sums in another order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.mesh import MeshShape, on_abstract_mesh
from jaxpar.sharding.collectives import AutomaticCollectives, ManualCollectives
from jaxpar.sharding.zero import shard_leaves, zero_stage
from jaxpar.step.gradients import make_gradients
from jaxpar.step.inputs import Replicated, make_inputs, microbatch_rows
from jaxpar.step.precision import make_precision
from tests.step.linear import (
    BATCH,
    LOSS,
    MASK,
    ROWS,
    X,
    make_partition,
    plain_loss,
)


@pytest.mark.parametrize(
    ("shape", "zero", "coupled", "accumulate"),
    [
        (MeshShape(data=1), 0, False, 2),
        (MeshShape(data=4), 1, False, 1),
        (MeshShape(data=4), 2, False, 2),
        (MeshShape(data=4), 3, False, 2),
        (MeshShape(data=4, tensor=2), 1, True, 1),
    ],
    ids=str,
)
def test_gradients_times_the_scale_equal_plain_jax(shape, zero, coupled, accumulate):
    partition, params = make_partition(shape, zero, coupled=coupled)
    gradients = make_gradients(partition, LOSS, (params, {}), accumulate)

    @jax.jit
    def run(params: Any, batch: Any) -> Any:
        with on_abstract_mesh(partition.mesh):
            given = {}, make_inputs(batch, jnp.int32(0)), jax.random.key(0)
            return gradients((params, {}), *given, jnp.float32(8.0), ())

    grads, sums, _, _ = run(params, BATCH)
    loss, right = jax.value_and_grad(plain_loss)(params, X, MASK)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, 8 * right[name], rtol=1e-5, atol=1e-5)
    assert float(sums.loss.total / sums.loss.weight) == pytest.approx(float(loss))
    assert float(sums.metrics["n"].value) == MASK.sum()


def test_batch_without_weight_has_gradients_of_zero():
    partition, params = make_partition(MeshShape(data=1), 0)
    gradients = make_gradients(partition, LOSS, (params, {}), 1)
    inputs = make_inputs(BATCH | {"mask": np.zeros(ROWS, np.float32)}, jnp.int32(0))
    given = {}, inputs, jax.random.key(0), jnp.float32(1), ()
    grads, *_ = jax.jit(gradients)((params, {}), *given)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_microbatch_takes_every_so_manieth_row():
    inputs = make_inputs({"x": jnp.asarray(X), "w": Replicated(3.0)}, jnp.int32(0))
    for index in range(4):
        picked = microbatch_rows(inputs, index, 4)
        np.testing.assert_array_equal(picked.batch["x"], X[index::4])
        assert picked.batch["w"].value == 3.0


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
