"""Do arrays over files have what was written, and is it known who still uses them?"""

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload.direct_io import allocate
from jaxpar.offload.disk_files import LeafOnDisk, Maps
from jaxpar.offload.on_disk import OnDisk

SHAPE = (8, 96)


def leaf_on(spec: P, folder: Path) -> LeafOnDisk:
    mesh = make_mesh(MeshShape(data=4, tensor=2), jax.devices()[:8])
    dtypes = np.dtype(np.float32), np.dtype(jnp.bfloat16)
    arrays = tuple(OnDisk(SHAPE, dtype) for dtype in dtypes)
    leaf = LeafOnDisk(0, "w", arrays, NamedSharding(mesh, spec))
    folder.mkdir()
    for shard in leaf.shards:
        allocate(leaf.file(folder, shard), leaf.num_bytes(shard))
    return leaf


def values(leaf: LeafOnDisk, seed: int = 0) -> list[jax.Array]:
    key = jax.random.key(seed)
    made = [jax.random.normal(key, x.shape).astype(x.dtype) for x in leaf.arrays]
    return [jax.device_put(x, leaf.sharding) for x in made]


def test_arrays_over_files_are_sharded_as_what_was_written(tmp_path: Path) -> None:
    for number, spec in enumerate((P("data", "tensor"), P(None, "data"), P())):
        version = tmp_path / str(number)
        leaf, maps = leaf_on(spec, version), Maps()
        assert len(leaf.shards) == (8, 4, 1)[number]
        for array, value in enumerate(values(leaf)):
            leaf.put(version, array, value)
            found = maps.array(version, leaf, array)
            assert found.sharding == leaf.sharding
            np.testing.assert_array_equal(found, value)
            assert maps.find(found) == (version, 0, array)
            assert maps.find(value) is None


def test_a_version_is_in_use_while_anyone_may_read_it(tmp_path: Path) -> None:
    leaf, maps = leaf_on(P("data"), tmp_path / "v"), Maps()
    leaf.put(tmp_path / "v", 0, values(leaf)[0])
    array = maps.array(tmp_path / "v", leaf, 0)
    view = np.asarray(array.addressable_shards[0].data)
    array.delete()
    gc.collect()
    assert maps.versions_in_use() == {tmp_path / "v"}
    del view, array
    gc.collect()
    jnp.zeros(1).block_until_ready()  # JAX lets go of it at its next call.
    assert maps.versions_in_use() == set()
