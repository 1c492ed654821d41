"""Do shards get to shifted devices as they are, with memory of their own?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.sharding.shifted import moved, shifted_mesh

SPECS = [P(), P("data"), P(None, "tensor"), P(("data", "tensor"))]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jaxpar.make_mesh(jaxpar.MeshShape(data=4, tensor=2))


def placed(values: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(jnp.asarray(values), NamedSharding(mesh, spec))


@pytest.mark.parametrize("by", [1, 2])
def test_shards_are_on_the_devices_before_with_memory_of_their_own(
    mesh: Mesh, by: int
) -> None:
    after = shifted_mesh(mesh, by)
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    arrays = [placed(values + i, mesh, spec) for i, spec in enumerate(SPECS)]
    for i, (x, other) in enumerate(zip(arrays, moved(arrays, after), strict=True)):
        assert other.sharding == NamedSharding(after, SPECS[i])
        np.testing.assert_array_equal(other, values + i)
        index = {s.device.id: s.index for s in other.addressable_shards}
        for shard in x.addressable_shards:
            assert index[(shard.device.id - by) % 8] == shard.index
        other.delete()
        np.testing.assert_array_equal(x, values + i)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "uint32", "int4"])
def test_arrays_of_other_dtypes_are_moved(mesh: Mesh, dtype: str) -> None:
    values = np.arange(64).reshape(8, 8).astype(jnp.dtype(dtype))
    (found,) = moved([placed(values, mesh, P("data"))], shifted_mesh(mesh, 1))
    np.testing.assert_array_equal(np.asarray(found), values)


def test_keys_empty_arrays_and_those_in_host_memory_are_moved(mesh: Mesh) -> None:
    after, whole = shifted_mesh(mesh, 1), NamedSharding(mesh, P())
    host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    given = [
        jax.device_put(jax.random.key(3), whole),
        placed(np.ones((0, 3), np.float32), mesh, P()),
        jax.device_put(np.arange(8.0, dtype=np.float32), host),
    ]
    key, empty, far = moved(given, after)
    assert key.dtype == given[0].dtype
    assert int(jax.random.bits(key)) == int(jax.random.bits(given[0]))
    assert empty.shape == (0, 3)
    assert far.sharding == NamedSharding(after, P("data"), memory_kind="pinned_host")
    np.testing.assert_array_equal(far, given[2])
    assert {x.sharding.mesh for x in (key, empty, far)} == {after}


def test_the_way_back_is_the_way_round(mesh: Mesh) -> None:
    values = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    given = [placed(values, mesh, P("data", "tensor"))]
    (found,) = moved(moved(given, shifted_mesh(mesh, 2)), mesh)
    assert found.sharding == given[0].sharding
    np.testing.assert_array_equal(found, values)
