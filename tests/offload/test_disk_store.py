"""Is the last whole step never overwritten, and found again?"""

import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.offload import disk_store
from jaxpar.offload.disk_files import LeafOnDisk
from jaxpar.offload.disk_pipeline import DiskPiece, DiskPipeline
from jaxpar.offload.disk_store import DiskStore
from jaxpar.offload.on_disk import OnDisk

SIZE = 64
BESIDE = {"step": [[], "uint8", ["()"]]}


def leaf(size: int = SIZE) -> LeafOnDisk:
    mesh = make_mesh(MeshShape(data=2), jax.devices()[:2])
    arrays = (OnDisk((size,), np.dtype(np.float32)),)
    return LeafOnDisk(0, "w", arrays, NamedSharding(mesh, P("data")))


def array(value: float) -> jax.Array:
    return jax.device_put(np.full(SIZE, value, np.float32), leaf().sharding)


def begun(folder: Path) -> DiskStore:
    store = DiskStore(folder, [leaf()])
    store.adopt({(0, 0): array(0)})
    return store


def step(store: DiskStore, number: int) -> None:
    """Add one, and commit."""

    def add(piece: DiskPiece, arrays: list[np.ndarray]) -> None:
        arrays[0] += 1

    own = store.leaves[0]
    pieces = [DiskPiece(own, shard, 0, SIZE // 2, add) for shard in own.shards]
    store.update(pieces, DiskPipeline(1, SIZE))
    commit(store, number)


def commit(store: DiskStore, number: int) -> None:
    rest = {"step@0": np.full(4, number, np.uint8)}
    store.commit(number, rest, lambda: ({"frozen@0": np.zeros(2, np.uint8)}, BESIDE))


def test_the_last_step_that_was_committed_is_found(tmp_path: Path) -> None:
    store = begun(tmp_path)
    commit(store, 0)
    for number in (1, 2, 3):
        step(store, number)
    store.update([], DiskPipeline(1, SIZE))  # Not committed.
    del store
    store = DiskStore(tmp_path, [leaf()])
    (found,) = store.whole
    assert found.step == 3
    store.begin_from(found)
    np.testing.assert_array_equal(store.array(0, 0), array(3))
    assert store.read_rest(found, BESIDE)["step@0"].tolist() == [3] * 4
    step(store, 4)
    np.testing.assert_array_equal(store.array(0, 0), array(4))


@pytest.mark.parametrize(
    ("others", "agreed"), [([2, 3], 2), ([0, 1], 1), ([7, 8], None)]
)
def test_processes_agree_on_the_newest_step_of_all(others, agreed, tmp_path) -> None:
    """And what is newer is forgotten before it is overwritten."""
    store = begun(tmp_path)
    for number in (1, 2):
        step(store, number)
    del store
    gathered = lambda own: np.stack([own, np.array(others)])  # noqa: E731
    with mock.patch.object(disk_store, "process_allgather", gathered):
        store = DiskStore(tmp_path, [leaf()])
    assert [each.step for each in store.whole] == ([] if agreed is None else [agreed])
    said = json.loads((store.folder / "state.json").read_text())
    assert (said["steps"] or [{"step": None}])[-1]["step"] == agreed
    if agreed is None:
        return
    # A new engine initialises its state beside it.
    store.adopt({(0, 0): array(50)})
    store.begin_from(store.whole[-1])
    np.testing.assert_array_equal(store.array(0, 0), array(agreed))


def test_two_versions_suffice_unless_somebody_reads_one(tmp_path: Path) -> None:
    store = begun(tmp_path)
    folders = lambda: sorted(x.name for x in store.folder.glob("v*"))  # noqa: E731
    for number in (1, 2, 3):
        step(store, number)
    assert folders() == ["v0", "v1"]
    held = np.asarray(store.array(0, 0).addressable_shards[0].data)
    for number in (4, 5, 6):
        step(store, number)
    assert folders() == ["v0", "v1", "v2"]
    np.testing.assert_array_equal(held, 3)
    del held
    jnp.zeros(1).block_until_ready()  # JAX lets go of it at its next call.
    for number in (7, 8, 9):
        step(store, number)
    assert folders() == ["v0", "v1"]
    np.testing.assert_array_equal(store.array(0, 0), array(9))


def test_a_new_state_does_not_overwrite_the_last_whole_step(tmp_path: Path) -> None:
    store = begun(tmp_path)
    step(store, 1)
    store.adopt({(0, 0): array(100)})
    np.testing.assert_array_equal(store.array(0, 0), array(100))
    assert not store.is_committed(1)
    del store
    store = DiskStore(tmp_path, [leaf()])
    (found,) = store.whole
    store.begin_from(found)
    np.testing.assert_array_equal(store.array(0, 0), array(1))


def test_an_array_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, [leaf()])
    made = store.put(0, 0, array(5))
    store.adopt({(0, 0): made})
    before = store.current
    store.adopt({(0, 0): store.array(0, 0)})
    assert store.current == before


def test_a_state_of_other_leaves_is_refused(tmp_path: Path) -> None:
    store = begun(tmp_path)
    commit(store, 3)
    del store
    with pytest.raises(ValueError, match=r"has step 3 of another model, optimizer"):
        DiskStore(tmp_path, [leaf(2 * SIZE)])
    (tmp_path / "process-0" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state.json is not JSON"):
        DiskStore(tmp_path, [leaf()])


def test_a_folder_has_one_user(tmp_path: Path) -> None:
    store = begun(tmp_path)
    with pytest.raises(ValueError, match="another engine uses"):
        DiskStore(tmp_path, [leaf()])
    assert store.current is not None


def test_what_is_committed_is_said_in_one_small_file(tmp_path: Path) -> None:
    store = begun(tmp_path)
    commit(store, 0)
    step(store, 1)
    said = json.loads((store.folder / "state.json").read_text())
    assert [each["step"] for each in said["steps"]] == [0, 1]
    files = {x.name for x in store.folder.iterdir() if x.is_file()}
    assert files == {"lock", "state.json", "fixed-0", "rest-0", "rest-1"}


@pytest.mark.parametrize(
    ("call", "which"), [("_write", 1), ("_write", 2), ("_replace", 1)]
)
def test_a_commit_that_failed_may_be_tried_again(call, which, tmp_path) -> None:
    """It fails at the leaves, at what is fixed, or at the name of the version."""
    store = begun(tmp_path)
    commit(store, 0)
    step(store, 1)
    store.adopt({(0, 0): array(70)})  # Its fixed file is to be written too.
    real, calls = getattr(disk_store, call), []

    def fails(path: Path, *args: object) -> None:
        calls.append(path)
        if len(calls) == which:
            path.write_bytes(b"")
            raise OSError(28, "No space left on device", str(path))
        real(path, *args)

    with (
        mock.patch.object(disk_store, call, fails),
        pytest.raises(OSError, match="No space left"),
    ):
        commit(store, 1)
    assert not store.is_committed(1)
    commit(store, 1)
    step(store, 2)
    del store
    store = DiskStore(tmp_path, [leaf()])
    store.begin_from(store.whole[-1])
    np.testing.assert_array_equal(store.array(0, 0), array(71))
    assert store.read_rest(store.whole[-1], BESIDE)["step@0"].tolist() == [2] * 4


def test_what_a_failed_commit_may_have_named_is_not_overwritten(tmp_path) -> None:
    """The file was renamed, and an error came after."""
    store = begun(tmp_path)
    step(store, 1)
    real = disk_store._replace

    def fails(path: Path, data: bytes) -> None:
        real(path, data)
        raise OSError(5, "Input/output error", str(path))

    with (
        mock.patch.object(disk_store, "_replace", fails),
        pytest.raises(OSError, match="Input/output"),
    ):
        step(store, 2)
    said = json.loads((store.folder / "state.json").read_text())["steps"][-1]
    store.adopt({(0, 0): array(70)})
    assert store.free_version().name != said["version"]
    assert store.current is not None
    assert store.current.name != said["version"]


def test_what_steps_don_t_change_is_read_once(tmp_path: Path) -> None:
    store, calls = begun(tmp_path), []

    def fixed() -> tuple[dict, dict]:
        calls.append("read")
        return {}, BESIDE

    for number in range(3):
        store.commit(number, {}, fixed)
    assert calls == ["read"]


def test_other_leaves_beside_and_damaged_files_are_refused(tmp_path: Path) -> None:
    store = begun(tmp_path)
    commit(store, 0)
    (last,) = store.whole
    for other in ({}, {"step": [[2], "uint8", ["()"]]}, {**BESIDE, "more": "on disk"}):
        with pytest.raises(ValueError, match=r"of another model.*(step|more) differ"):
            store.read_rest(last, other)
    (store.folder / last.fixed).write_bytes(b"")
    with pytest.raises(ValueError, match=r"fixed-0 is damaged.*checkpoint"):
        store.read_rest(last, BESIDE)
