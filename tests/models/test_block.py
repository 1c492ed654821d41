"""Are a block's norms where they are asked for, and is its residual stream sharded?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models.block import TransformerBlock, constrain_residual, gather_tokens


@pytest.mark.parametrize(
    ("sequence_parallel", "spec"), [(True, P("data", "tensor")), (False, P("data"))]
)
def test_residual_is_split_over_tokens_where_asked_and_gathered_after_a_norm(
    sequence_parallel: bool, spec: P
):
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            constrain_residual(x, sequence_parallel),
            gather_tokens(x + 1, sequence_parallel),
        )

    with jax.set_mesh(mesh):
        residual, gathered = jax.jit(both)(jnp.ones((4, 6, 8)))
    assert residual.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 3)
    whole = jax.NamedSharding(mesh, P("data"))
    assert gathered.sharding.is_equivalent_to(whole, 3)
    np.testing.assert_array_equal(gathered, np.full((4, 6, 8), 2))


@pytest.mark.parametrize("norms", ["before", "both", "after_sum"])
def test_norms_stand_where_they_are_asked_for(norms):
    def halve(x: jax.Array) -> jax.Array:
        return x / 2

    block = TransformerBlock(
        lambda x, shift: x + shift,
        lambda x: 3 * x,
        make_norm=lambda: halve,
        norms=norms,
        rngs=nnx.Rngs(0),
    )
    x = jnp.ones((1, 1, 1))
    if norms == "before":
        x = x + (halve(x) + 1)
        want = x + 3 * halve(x)
    elif norms == "both":
        x = x + halve(halve(x) + 1)
        want = x + halve(3 * halve(x))
    else:
        x = halve(x + (x + 1))
        want = halve(x + 3 * x)
    np.testing.assert_array_equal(block.run(jnp.ones((1, 1, 1)), shift=1), want)


def test_dropped_rows_lose_their_whole_update():
    block = TransformerBlock(
        lambda x: x,
        lambda x: 0 * x,
        make_norm=lambda: lambda x: x,
        dropout=0.5,
        drop_rows=True,
        rngs=nnx.Rngs(0),
    )
    x = jnp.ones((64, 3, 2))
    update = np.asarray(block.run(x) - x)
    of_rows = update.reshape(64, -1)
    assert (of_rows == of_rows[:, :1]).all()
    assert set(np.unique(update)) == {0, 2}
