"""Does a tier of memory give the newest step that is whole, and no other?"""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint.memory_tier import MemoryTier


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


def tree(seed: int, data: int = 4, tensor: int = 2) -> dict[str, Any]:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=data, tensor=tensor))
    key = jax.random.key(seed)

    def put(values: jax.Array, *axes: str | None) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    return {
        "w": put(jax.random.normal(key, (8, 8)), "data", "tensor"),
        "b": put(jax.random.normal(key, (6,))),
        "none": put(jnp.zeros((0, 3))),
        "key": put(key),
    }


def values(state: dict[str, Any]) -> list[bytes]:
    plain = {**state, "key": jax.random.key_data(state["key"])}
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def files(tier: MemoryTier) -> list[Path]:
    return sorted(tier.memory.glob("process-*"))


def of_step(tier: MemoryTier, step: int) -> Path:
    (found,) = [x for x in files(tier) if f'"step": {step},'.encode() in x.read_bytes()]
    return found


def kept(run: Path, root: Path, *steps: int) -> MemoryTier:
    """What a process that was killed leaves."""
    tier = MemoryTier(run, root=root)
    for step in steps:
        tier.save(step, tree(step), data_state={"rows": step}, meta={"x": step})
    tier.wait()
    tier.close()
    return tier


def test_newest_of_two_steps_comes_back(run: Path, root: Path) -> None:
    tier = kept(run, root, 1, 2, 3)
    assert len(files(tier)) == 2
    again = MemoryTier(run, root=root)
    found = again.restore(tree(0))
    assert (found.step, found.data_state, found.meta) == (3, {"rows": 3}, {"x": 3})
    assert values(found.tree) == values(tree(3))
    assert again.meta(3) == {"x": 3}
    assert again.meta(2) is None


def test_going_on_writes_over_the_older_step(run: Path, root: Path) -> None:
    """A kill at any moment of it leaves the one that was restored."""
    kept(run, root, 1, 2, 3)
    again = MemoryTier(run, root=root)
    again.restore(tree(0))
    again.save(4, tree(4))
    again.wait()
    assert of_step(again, 3).exists()
    assert of_step(again, 4).exists()


@pytest.mark.parametrize("place", [3, 80, -3], ids=["head", "shard", "table"])
def test_damaged_step_falls_back_to_the_one_before(
    run: Path, root: Path, place: int
) -> None:
    tier = kept(run, root, 1, 2, 3)
    path = of_step(tier, 3)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    found = MemoryTier(run, root=root).restore(tree(0))
    assert found.step == 2
    assert values(found.tree) == values(tree(2))


def test_memory_that_is_gone_has_nothing(run: Path, root: Path) -> None:
    shutil.rmtree(kept(run, root, 1).memory)
    with pytest.raises(FileNotFoundError, match="restore from the checkpoints"):
        MemoryTier(run, root=root).restore(tree(0))


@pytest.mark.parametrize("newest", [3, 4])
def test_checkpoint_as_new_is_preferred(run: Path, root: Path, newest: int) -> None:
    kept(run, root, 1, 2, 3)
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(newest, tree(newest))
    checkpoints.close()
    with pytest.raises(FileNotFoundError, match="newer than its checkpoints"):
        MemoryTier(run, root=root).restore(tree(0))


def test_other_mesh_or_model_is_not_restored(run: Path, root: Path) -> None:
    kept(run, root, 1)
    with pytest.raises(FileNotFoundError, match="of this mesh"):
        MemoryTier(run, root=root).restore(tree(0, data=2, tensor=4))
    other = {**tree(0), "more": tree(0)["b"]}
    with pytest.raises(FileNotFoundError):
        MemoryTier(run, root=root).restore(other)
    half = {**tree(0), "b": tree(0)["b"].astype(jnp.bfloat16)}
    with pytest.raises(FileNotFoundError):
        MemoryTier(run, root=root).restore(half)


def test_what_a_run_left_behind_is_not_restored(run: Path, root: Path) -> None:
    """After a rollback it goes on from an older step, without some batches."""
    tier = MemoryTier(run, root=root)
    tier.save(3, tree(3))
    tier.forget()
    with pytest.raises(FileNotFoundError):
        MemoryTier(run, root=root).restore(tree(0))
    tier.save(2, tree(2))
    tier.wait()
    assert MemoryTier(run, root=root).restore(tree(0)).step == 2


def test_start_from_the_disk_is_another_timeline(run: Path, root: Path) -> None:
    """Copies of the one before are older, or of other steps."""
    kept(run, root, 5, 6)
    other = kept(run, root, 3)
    assert of_step(other, 6).exists() or of_step(other, 5).exists()
    assert MemoryTier(run, root=root).restore(tree(0)).step == 3


def test_other_run_has_a_memory_of_its_own(
    run: Path, root: Path, tmp_path: Path
) -> None:
    kept(run, root, 1)
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError):
        MemoryTier(tmp_path / "other", root=root).restore(tree(0))


def test_memory_without_room_keeps_the_step_before(
    run: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tier = MemoryTier(run, root=root)
    tier.save(1, tree(1))
    tier.wait()
    monkeypatch.setattr(os, "posix_fallocate", full)
    tier.save(2, tree(2))
    with pytest.warns(UserWarning, match="process 0: .*No space left"):
        tier.save(3, tree(3))
    monkeypatch.undo()
    tier.wait()  # Said once.
    assert MemoryTier(run, root=root).restore(tree(0)).step == 1
    tier.save(4, tree(4))
    tier.wait()
    assert MemoryTier(run, root=root).restore(tree(0)).step == 4


def test_memory_is_for_one_user(run: Path, root: Path) -> None:
    tier = kept(run, root, 1)
    assert tier.memory.stat().st_mode & 0o777 == 0o700
    assert files(tier)[0].stat().st_mode & 0o777 == 0o600
    tier.memory.chmod(0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        MemoryTier(run, root=root)


def test_root_that_is_no_folder_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="must be a folder in memory"):
        MemoryTier(run, root=tmp_path / "none")


def test_memory_of_deleted_runs_is_deleted(
    run: Path, root: Path, tmp_path: Path
) -> None:
    left = kept(run, root, 1).memory
    other = tmp_path / "other"
    other.mkdir()
    MemoryTier(other, root=root)
    assert left.exists()
    shutil.rmtree(run)
    MemoryTier(other, root=root)
    assert not left.exists()


def test_end_of_a_run_deletes_its_memory(run: Path, root: Path) -> None:
    tier = MemoryTier(run, root=root)
    tier.save(1, tree(1))
    tier.close(delete=True)
    assert not tier.memory.exists()
