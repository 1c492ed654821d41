"""Is a kernel called on each device's own heads and rows, where they can be split?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models.shard_kernel import Split, on_pieces, split_of


def split_on(mesh: MeshShape, rows: int, key_heads: int) -> Split:
    query = jnp.zeros((rows, 1, 2 * key_heads, 1))
    key = jnp.zeros((rows, 1, key_heads, 1))
    with jax.set_mesh(make_mesh(mesh)):
        return split_of(query, key)


@pytest.mark.parametrize(
    ("mesh", "rows", "key_heads", "split"),
    [
        (MeshShape(data=2, tensor=4), 4, 4, Split("tensor", "data")),
        (MeshShape(data=2, tensor=4), 3, 4, Split("tensor", None)),
        # Eight query heads, but a device would have half of a key head.
        (MeshShape(data=2, tensor=4), 4, 2, Split(None, "data")),
        (MeshShape(data=8), 8, 3, Split(None, "data")),
        (MeshShape(data=1, tensor=8), 1, 8, Split("tensor", None)),
    ],
)
def test_heads_and_rows_are_split_where_their_axis_divides_them(
    mesh, rows, key_heads, split
):
    assert split_on(mesh, rows, key_heads) == split


def test_nothing_is_split_without_a_mesh():
    assert split_of(jnp.zeros((8, 1, 8, 1)), jnp.zeros((8, 1, 8, 1))) == (None, None)


def test_axis_that_is_manual_already_is_not_split_again():
    found = []

    def body(x: jax.Array) -> jax.Array:
        found.append(split_of(x, x))
        return x

    with jax.set_mesh(make_mesh(MeshShape(data=2, tensor=4))):
        jax.jit(
            jax.shard_map(
                body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
            )
        ).trace(jnp.zeros((4, 1, 4, 1)))
    assert set(found) == {Split("tensor", None)}


def test_call_gets_the_pieces_of_one_device_and_its_results_are_joined():
    """Each piece is marked by its smallest number, as no other piece would be."""
    shapes, x = [], np.arange(4 * 3 * 4 * 2.0).reshape(4, 3, 4, 2)

    def call(piece: jax.Array) -> jax.Array:
        shapes.append(piece.shape)
        return jnp.full_like(piece, piece.min())

    with jax.set_mesh(make_mesh(MeshShape(data=2, tensor=4))):
        split = split_of(jnp.asarray(x), jnp.asarray(x))
        spec = P(split.rows, None, split.heads)
        got = jax.jit(on_pieces(call, (spec,), spec, split))(x)
    assert set(shapes) == {(2, 3, 1, 2)}
    right = [
        np.full((2, 3, 1, 2), x[2 * row : 2 * row + 2, :, [head]].min())
        for row in range(2)
        for head in range(4)
    ]
    rows = [np.concatenate(right[4 * row : 4 * row + 4], 2) for row in range(2)]
    np.testing.assert_array_equal(got, np.concatenate(rows))


def test_call_stays_as_it_is_where_nothing_is_split():
    assert on_pieces(np.sin, (P(),), P(), Split(None, None)) is np.sin
