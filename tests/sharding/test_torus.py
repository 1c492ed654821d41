"""Are the dims of a torus found in the coordinates of a mesh's chips?"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.sharding.collectives import ManualCollectives, manual_spec
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.torus import dims_of, groups_along, torus_dims


def arranged(coords, *sizes):
    """Coordinates by the places on data and tensor, as [tensor, data, 3]."""
    data, *tensor = sizes
    return np.array(coords).reshape(data, *(tensor or [1]), 3).swapaxes(0, 1)


CUBE = [(x, y, z) for x, y, z in itertools.product(range(4), repeat=3)]
SQUARE = [(x, y, 0) for x, y in itertools.product(range(8), repeat=2)]
SNAKE = [
    (x, y if x % 2 else 7 - y, 0) for x, y in itertools.product(range(8), repeat=2)
]
FOUND = {
    "a cube": (arranged(CUBE, 64), (4, 4, 4)),
    "other order of dims": (arranged([c[::-1] for c in CUBE], 64), (4, 4, 4)),
    "tensor on one dim": (arranged(CUBE, 16, 4), (4, 4)),
    "a square": (arranged(SQUARE, 64), (8, 8)),
    "backwards": (arranged([(7 - x, y, z) for x, y, z in SQUARE], 64), (8, 8)),
    "a snake": (arranged(SNAKE, 64), ()),
    "one line": (arranged([(x, 0, 0) for x in range(16)], 16), ()),
    "shuffled": (arranged([CUBE[(5 * i) % 64] for i in range(64)], 64), ()),
}


@pytest.mark.parametrize("case", FOUND)
def test_dims_are_found_where_digits_move_along_one_each(case):
    coords, dims = FOUND[case]
    assert dims_of(coords) == dims


def test_devices_without_coordinates_have_no_torus():
    mesh = make_mesh(MeshShape(data=4), jax.devices()[:4])
    assert torus_dims(mesh, "data") == ()


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2, 2)])
def test_by_dim_an_array_is_gathered_and_reduced_as_at_once(sizes):
    """On eight CPU devices in the same order: the arrays are equal to the bit."""
    mesh = make_mesh(MeshShape(data=8), jax.devices()[:8])
    shape = (1024, 512)
    axes = {"data": 8}
    leaf = LeafSharding("w", shape, (None, None), 0, ((), ()), axes, "")
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)

    def both(torus):
        over = ManualCollectives(("data",), jnp.dtype(jnp.float32), "cpu", torus)

        def body(shard):
            whole = over.gather(leaf, shard)
            index = jax.lax.axis_index("data").astype(jnp.float32)
            return whole, over.reduce(leaf, whole * (index + 1))

        spec = manual_spec(leaf)
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=spec,
            out_specs=(P(), spec),
            axis_names={"data"},
            check_vma=False,
        )
        return jax.jit(run)(x)

    assert len(groups_along(sizes, 0)) == 8 // sizes[0]
    (whole, reduced), right = both(sizes), both(())
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(reduced, x * 36)
    np.testing.assert_array_equal(reduced, right[1])
