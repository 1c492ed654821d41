"""Do rows reach the devices that need them, in the order of the processes?

With several processes they move over a network (tests/multiprocess); here their part is
played by NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.engine import place_rows
from jaxpar.mesh import MeshShape, make_mesh

X = np.arange(24.0).reshape(8, 3)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshShape(data=4, tensor=2))


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_every_data_shard_has_its_rows_on_all_of_its_devices(mesh, make):
    placed = place_rows.place_own(make(X), 8, mesh)
    assert placed.sharding == NamedSharding(mesh, P("data"))
    for shard, devices in enumerate(mesh.devices.reshape(4, 2)):
        for piece in placed.addressable_shards:
            if piece.device in devices:
                np.testing.assert_array_equal(piece.data, X[2 * shard : 2 * shard + 2])


def test_full_copy_is_placed_at_the_sharding_that_is_asked_for(mesh):
    sharding = NamedSharding(mesh, P(None))
    placed = place_rows.place_same(X, sharding)
    assert placed.sharding == sharding
    assert all(np.array_equal(s.data, X) for s in placed.addressable_shards)


def test_one_process_has_all_rows():
    assert place_rows.agree_on_rows(5) == [5]
    assert place_rows.gather_rows(X, [8]) is X


def test_array_of_all_rows_is_not_gathered_again():
    array = jnp.asarray(X)
    assert place_rows.gather_rows(array, [3, 5]) is array


@pytest.mark.parametrize("counts", [[3, 8], [5, 0, 1], [4, 4]])
def test_rows_of_all_processes_are_joined_without_their_padding(counts, monkeypatch):
    """The process that asks has the first of `counts`; the exchange is equal shapes."""
    rng, shapes = np.random.default_rng(0), []
    own = [rng.normal(size=(count, 3)).astype(np.float32) for count in counts]

    def exchange(padded: np.ndarray) -> np.ndarray:
        shapes.append(padded.shape)
        others = np.full((len(own), *padded.shape), np.nan, padded.dtype)
        for number, rows in enumerate(own):
            others[number, : len(rows)] = rows
        np.testing.assert_array_equal(padded[: counts[0]], own[0])
        return others

    monkeypatch.setattr(multihost_utils, "process_allgather", exchange)
    got = place_rows.gather_rows(own[0], counts)
    np.testing.assert_array_equal(got, np.concatenate(own))
    width = {8: 8, 5: 8, 4: 4}[max(counts)]
    assert shapes == [(width, 3)]


def test_processes_tell_each_other_their_rows(monkeypatch):
    def exchange(count: np.int32) -> np.ndarray:
        return np.array([count, 7], np.int32)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", exchange)
    assert place_rows.agree_on_rows(5) == [5, 7]
