"""Do arrays come back onto any sharding, under names that no file system refuses?"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.checkpoint import arrays
from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.checkpoint.outcome import SaveOutcome

VALUES = {"params/w": np.arange(32.0).reshape(8, 4), "b": np.arange(8, dtype=np.int32)}


def struct(name: str, devices: int, *spec: str | None) -> jax.ShapeDtypeStruct:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=devices), jax.devices()[:devices])
    value = jnp.asarray(VALUES[name])
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    placed = {
        name: jax.device_put(value, struct(name, 4, "data").sharding)
        for name, value in VALUES.items()
    }
    writer = arrays.Writer()
    writer.start(folder, placed, SaveOutcome(0, 0))
    for each in placed.values():
        each.delete()  # As a donated step would.
    writer.wait()
    writer.close()
    return folder


def test_arrays_come_back_onto_another_sharding(written):
    structs = {"params/w": struct("params/w", 2, None, "data"), "b": struct("b", 8)}
    found = arrays.read_sharded(written, structs)
    for name, array in found.items():
        np.testing.assert_array_equal(array, VALUES[name])
        assert array.sharding == structs[name].sharding


def test_step_is_held_to_what_its_manifest_declares(written):
    leaves = {
        "params/w": LeafSpec((8, 4), "float32"),
        "b": LeafSpec((8,), "int32"),
        "empty": LeafSpec((0,), "float32"),
    }
    arrays.require_declared(written, leaves)
    for name, other in (("b", LeafSpec((8,), "float32")), ("new", leaves["b"])):
        with pytest.raises(RuntimeError, match=f"arrays {name} on disk differ"):
            arrays.require_declared(written, {**leaves, name: other})


def test_names_are_files_of_the_folder_and_differ():
    long = "x" * 300
    names = [arrays.array_name(leaf) for leaf in ("a/b", "a.b", "..", long, long + "y")]
    assert len(set(names)) == len(names)
    for name in names:
        assert len(name) <= 180
        assert not set(name) & set("/\\.\0")
