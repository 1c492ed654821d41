"""Do leaves beside those on disk come back from their bytes?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload.on_disk import OnDisk
from jaxpar.offload.rest import bytes_of_leaves, described, leaves_from_bytes


def state() -> dict:
    mesh = make_mesh(MeshShape(data=4), jax.devices()[:4])
    made = {
        "count": (jnp.int32(7), P()),
        "half": (jnp.arange(8, dtype=jnp.bfloat16), P("data")),
        "flag": (jnp.array([True, False]), P()),
        "key": (jax.random.key(3), P()),
        "none": (jnp.zeros((0, 4)), P()),
    }
    return {
        name: jax.device_put(x, NamedSharding(mesh, spec))
        for name, (x, spec) in made.items()
    }


def structs(tree: dict) -> dict:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def test_leaves_come_back_as_they_were() -> None:
    given = state()
    stored = bytes_of_leaves(given)
    assert sum(name.startswith("half@") for name in stored) == 4
    found = leaves_from_bytes(structs(given), stored)
    for name, x in given.items():
        assert found[name].sharding.is_equivalent_to(x.sharding, x.ndim)
        assert found[name].dtype == x.dtype
        plain = [
            jax.random.key_data(y) if name == "key" else y for y in (x, found[name])
        ]
        np.testing.assert_array_equal(*plain)


def test_bytes_of_another_state_are_refused_by_name() -> None:
    given = state()
    stored = bytes_of_leaves(given) | {"half@2": np.zeros(6, np.uint8)}
    with pytest.raises(ValueError, match="has 6 bytes of half, but 4 are needed"):
        leaves_from_bytes(structs(given), stored)
    del stored["half@2"]
    with pytest.raises(ValueError, match="has 0 bytes of half"):
        leaves_from_bytes(structs(given), stored)


def test_two_trees_are_alike_if_their_leaves_and_parts_are() -> None:
    given = state()
    assert described(given) == described(structs(given))
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])
    moved = jax.device_put(given["half"], NamedSharding(mesh, P("tensor")))
    assert described({"half": moved}) != described({"half": given["half"]})
    assert described({"x": OnDisk((2,), np.dtype(np.float32))}) == {"x": "on disk"}
