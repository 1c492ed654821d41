"""Is one flipped bit in one device's copy found, and the device named?"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.engine.replicas import make_probe, pieces_of
from tests.runs import flip_in_one_replica, fresh


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bit_in_one_replica_is_caught_and_its_device_named(seed: int) -> None:
    engine = fresh()
    engine.probe()
    name, device = flip_in_one_replica(engine, random.Random(seed))
    with pytest.raises(jaxpar.CorruptionError, match=rf"{name} on device {device} \("):
        engine.probe()


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bfloat16",
        "float16",
        "int8",
        "int4",
        "uint4",
        "float8_e4m3fn",
        "float4_e2m1fn",
        "bool",
        "complex64",
    ],
)
def test_arrays_of_every_dtype_are_compared(dtype: str) -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=8))
    sharding = NamedSharding(mesh, P())
    values = np.ones(6, jnp.dtype(dtype))
    other = values.copy()
    other[4] = 0
    copies = [jax.device_put(values, d) for d in mesh.devices.flat]
    leaf = jax.make_array_from_single_device_arrays(values.shape, sharding, copies)
    probe = make_probe(mesh, {"leaf": sharding})
    probe.check([leaf])
    copies[3] = jax.device_put(other, mesh.devices.flat[3])
    leaf = jax.make_array_from_single_device_arrays(values.shape, sharding, copies)
    with pytest.raises(jaxpar.CorruptionError, match=r"leaf on device 3 \("):
        probe.check([leaf])


def test_leaves_without_elements_are_taken() -> None:
    """XLA:CPU crashed on them beside another leaf."""
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=8))
    whole = NamedSharding(mesh, P())
    leaves = [jax.device_put(np.ones(shape), whole) for shape in ((0, 3), (2,))]
    make_probe(mesh, {"empty": whole, "other": whole}).check(leaves)


def test_of_two_that_differ_both_are_named() -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=4, tensor=2))
    sharding = NamedSharding(mesh, P("data"))
    values = [np.full(2, i // 2, np.float32) for i in range(8)]
    values[5][0] = 7.0
    copies = [
        jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)
    ]
    leaf = jax.make_array_from_single_device_arrays((8,), sharding, copies)
    with pytest.raises(jaxpar.CorruptionError, match=r"device 4 .* leaf on device 5"):
        make_probe(mesh, {"leaf": sharding}).check([leaf])


def test_only_pieces_held_twice_are_compared() -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=4, tensor=2))
    devices = list(mesh.devices.flat)
    both = NamedSharding(mesh, P(("data", "tensor")))
    assert pieces_of(both, (8,), devices) == []
    data = NamedSharding(mesh, P("data"))
    assert pieces_of(data, (8,), devices) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pieces_of(NamedSharding(mesh, P()), (8,), devices) == [list(range(8))]
