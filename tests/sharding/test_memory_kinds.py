"""Are arrays on the host known, copied to the device in a jit, and put back?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.sharding.memory_kinds import (
    beside,
    has_memory_kinds,
    in_memory_of,
    is_on_host,
    to_device,
    to_host,
)


def place(kind: str = "device") -> NamedSharding:
    mesh = make_mesh(MeshShape(data=8))
    return NamedSharding(mesh, P("data"), memory_kind=kind)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("device", False), ("pinned_host", True), ("unpinned_host", True)],
)
def test_memory_of_a_sharding_is_known(kind, expected):
    assert is_on_host(place(kind)) == expected
    assert not is_on_host(None)


def test_cpus_have_memory_kinds():
    assert has_memory_kinds(place().mesh)


def test_only_arrays_on_the_host_are_copied_to_the_device():
    values = np.arange(8.0, dtype=np.float32)
    there = jax.device_put(values, place("pinned_host"))
    here = jax.device_put(values, place())
    spaces = []

    @jax.jit
    def double(arrays):
        found = to_device(arrays)
        spaces.extend(jax.typeof(x).memory_space for x in found.values())
        return jax.tree.map(lambda x: 2 * x, found)

    doubled = double({"there": there, "here": here})
    assert spaces == [jax.memory.Space.Device] * 2
    assert {x.sharding.memory_kind for x in doubled.values()} == {"device"}
    np.testing.assert_array_equal(doubled["there"], 2 * values)
    text = str(jax.make_jaxpr(to_device)({"here": here}))
    assert "device_put" not in text


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_arrays_move_only_to_another_memory(kind):
    arrays = [jax.device_put(jnp.ones(8), place(k)) for k in ("device", "pinned_host")]
    moved = in_memory_of(arrays, [place(kind)] * 2)
    assert {x.sharding.memory_kind for x in moved} == {kind}
    kept = ["device", "pinned_host"].index(kind)
    assert moved[kept] is arrays[kept]


def test_arrays_are_moved_only_where_they_are_not() -> None:
    def moved(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return to_host(to_host(x)), beside(x, x)

    text = str(jax.make_jaxpr(moved)(jnp.ones(3)))
    assert text.count("MemorySpace.Host") == 1
    assert text.count("device_put") == 1
