"""Is a loss without gradients that of plain JAX, in parts and with left-over rows?"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.mesh import MeshShape, on_abstract_mesh
from jaxpar.step.evaluation import make_evaluation, make_forward
from jaxpar.step.inputs import make_inputs
from tests.step.linear import BATCH, LOSS, MASK, ROWS, X, make_partition, plain_loss


def test_forward_adds_up_its_parts():
    partition, params = make_partition(MeshShape(data=1), 0)
    forward = make_forward(partition, LOSS, (params, {}), training=True)
    inputs = make_inputs(BATCH, jnp.int32(0))
    given = inputs, {}, jax.random.key(0)
    sums = jax.jit(forward, static_argnums=4)(partition.views((params, {})), *given, 4)
    right = plain_loss(params, X, MASK)
    assert float(sums.loss.total / sums.loss.weight) == pytest.approx(float(right))
    assert float(sums.metrics["n"].value) == MASK.sum()


@pytest.mark.parametrize("rows", [ROWS, 3])
def test_evaluation_takes_rows_over_data_or_left_over_ones_once(rows):
    """Left-over rows are on all four shards and count once."""
    partition, params = make_partition(MeshShape(data=4), 1)
    evaluation = make_evaluation(partition, LOSS, (params, {}))

    @jax.jit
    def run(params: Any, batch: Any) -> Any:
        with on_abstract_mesh(partition.mesh):
            given = {}, make_inputs(batch, jnp.int32(0)), jax.random.key(0)
            return evaluation((params, {}), *given, rows < ROWS)

    sums = run(params, {name: leaf[:rows] for name, leaf in BATCH.items()})
    right = plain_loss(params, X[:rows], MASK[:rows])
    assert float(sums.loss.total / sums.loss.weight) == pytest.approx(float(right))
    assert float(sums.loss.weight) == MASK[:rows].sum()
