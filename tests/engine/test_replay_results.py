"""Do three runs tell which device was wrong, and only if they can?"""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.engine.replay_results import (
    Results,
    describe,
    differences,
    judge,
    wrong_device,
)
from jaxpar.sharding.shifted import moved, shifted_mesh

NAMES = {"w": P("data"), "metrics/loss": P()}
SHAPES = (8,), ()


@pytest.fixture(scope="module")
def meshes() -> list[Mesh]:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=4), jax.devices()[:4])
    return [shifted_mesh(mesh, by) for by in range(3)]


def results(mesh: Mesh, hashes: np.ndarray) -> Results:
    places = {name: NamedSharding(mesh, spec) for name, spec in NAMES.items()}
    return Results(mesh, places, SHAPES, hashes, None)


def runs(meshes: list[Mesh], wrong: set[tuple[int, int, int]]) -> list[Results]:
    """Runs in which some (run, device, leaf) are wrong, each in its own way."""
    found = []
    for run, mesh in enumerate(meshes):
        hashes = np.zeros((4, 2), np.uint32)
        for place, device in enumerate(mesh.devices.flat):
            for leaf in range(2):
                if (run, device.id, leaf) in wrong:
                    hashes[place, leaf] = 10 + run
        found.append(results(mesh, hashes))
    return found


@pytest.mark.parametrize(
    ("run", "device", "leaf"), list(itertools.product(range(3), range(4), range(2)))
)
def test_device_that_is_wrong_once_is_named(
    meshes: list[Mesh], run: int, device: int, leaf: int
) -> None:
    said = describe(runs(meshes, {(run, device, leaf)}), 0.0)
    assert f"By the vote of 3 runs device {device} (cpu, process 0) is wrong" in said


@pytest.mark.parametrize("device", range(4))
def test_device_that_is_wrong_in_all_runs_is_named(
    meshes: list[Mesh], device: int
) -> None:
    said = describe(runs(meshes, {(run, device, 0) for run in range(3)}), 0.0)
    assert f"By the vote of 3 runs device {device} (" in said


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({(0, 1, 0), *((0, d, 1) for d in range(4))}, "both replays agree: the step"),
        ({(1, d, 0) for d in range(4)}, "the other one was wrong, once"),
        ({(r, d, 0) for r in (0, 1) for d in range(4)}, "in more than one run"),
        ({(r, d, 1) for r in range(3) for d in range(4)}, "in more than one run"),
    ],
)
def test_no_device_is_blamed_for_what_collectives_spread(
    meshes: list[Mesh], wrong: set, why: str
) -> None:
    said = describe(runs(meshes, wrong), 0.0)
    assert "Which device is wrong is not known (collectives have spread the" in said
    assert why in said


def test_of_two_runs_none_is_blamed(meshes: list[Mesh]) -> None:
    said = describe(runs(meshes[:2], {(0, 1, 0)}), 0.0)
    assert "w[2:4] by device 1 (cpu, process 0) and device 0 (cpu, process 0)" in said
    assert "two devices have no third one" in said


def test_only_some_shards_are_named(meshes: list[Mesh]) -> None:
    wrong = {(0, device, leaf) for device in range(4) for leaf in range(2)}
    said = describe(runs(meshes, wrong), 0.0)
    assert "; and 4 more." in said
    assert "metrics/loss" not in said


def test_runs_that_agree_have_no_verdict(meshes: list[Mesh]) -> None:
    equal = np.zeros((4, 2), bool)
    assert judge([equal] * 3) == []
    assert wrong_device(judge([equal | True] * 3), meshes) is None


def arrays(mesh: Mesh, values: np.ndarray) -> Results:
    """A result with arrays; every shard's hash is another one."""
    x = jax.device_put(values, NamedSharding(mesh, P("data")))
    hashes = np.full((4, 1), hash(mesh) % 2**31, np.uint32)
    return Results(mesh, {"w": NamedSharding(mesh, P("data"))}, (x.shape,), hashes, [x])


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda x: x * np.float32(1.01), 0.01),
        (lambda x: x, 0.0),
        (lambda x: np.where(x > 0, np.nan, x).astype(x.dtype), np.inf),
    ],
)
def test_distance_is_relative_to_the_shards_norm(
    meshes: list[Mesh], change: object, right: float
) -> None:
    values = np.arange(1, 9, dtype=np.float32)
    assert callable(change)
    one, other = arrays(meshes[0], change(values)), arrays(meshes[1], values)
    assert one.distances(other)[:, 0] == pytest.approx([right] * 4, rel=1e-4)


def test_distance_of_integers_and_of_equal_nans(meshes: list[Mesh]) -> None:
    whole = np.arange(8, dtype=np.int32)
    changed = whole + (whole > 5)
    found = arrays(meshes[0], changed).distances(arrays(meshes[1], whole))[:, 0]
    assert found.tolist() == [0, 0, 0, np.inf]
    nan = np.full(8, np.nan, np.float32)
    one, other = arrays(meshes[0], nan), arrays(meshes[1], nan)
    assert not differences(one, other, 1e-6).any()
    assert differences(one, other, 0.0).all()


def test_results_are_compared_shard_by_shard(meshes: list[Mesh]) -> None:
    """The replay's shards come back from other devices."""
    values = np.arange(1, 9, dtype=np.float32)
    one = arrays(meshes[0], values)
    changed = values.copy()
    changed[5] *= 1.5
    (there,) = moved([arrays(meshes[0], changed).arrays[0]], meshes[1])
    other = Results(meshes[1], one.shardings, one.shapes, one.hashes + 1, [there])
    found = differences(one, other, 1e-3)[:, 0]
    assert found.tolist() == [False, False, True, False]
    assert one.shard(0, 2) == "w[4:6]"
