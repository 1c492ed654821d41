"""Are gradients over shards and micro-batches those of plain JAX on the whole batch?

The tolerance, 1e-5, is for fp32 sums in another order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.mesh import MeshShape, on_abstract_mesh
from jaxpar.step.gradients import make_gradients
from jaxpar.step.inputs import Replicated, make_inputs, microbatch_rows
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
            return gradients((params, {}), *given, jnp.float32(8.0), {})

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
    given = {}, inputs, jax.random.key(0), jnp.float32(1), {}
    grads, *_ = jax.jit(gradients)((params, {}), *given)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_microbatch_takes_every_so_manieth_row():
    inputs = make_inputs({"x": jnp.asarray(X), "w": Replicated(3.0)}, jnp.int32(0))
    for index in range(4):
        picked = microbatch_rows(inputs, index, 4)
        np.testing.assert_array_equal(picked.batch["x"], X[index::4])
        assert picked.batch["w"].value == 3.0
