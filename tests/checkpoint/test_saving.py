"""Is a save asynchronous, safe from what follows it, and never at another's cost?"""

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import checkpoint_manager

from jaxpar.checkpoint import Checkpoints, store

Tree = dict[str, Any]
Bits = Callable[[Any], list[bytes]]


def save(folder: Path, *steps: int, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, tree)
    checkpoints.close()


def everything_in(folder: Path) -> dict[Path, bytes | None]:
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (None, [1, 3, 4])])
def test_keep_leaves_the_newest(
    keep: int | None, left: list[int], folder: Path, tree: Tree
) -> None:
    checkpoints = Checkpoints(folder, keep=keep)
    for step in (1, 3, 4):
        checkpoints.save(step, tree)
    checkpoints.wait()
    assert checkpoints.steps() == left
    assert len(list(folder.iterdir())) == len(left)
    checkpoints.close()


def test_keep_counts_checkpoints_of_earlier_processes(folder: Path, tree: Tree) -> None:
    save(folder, 1, 2, tree=tree)
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.restore(tree)
    checkpoints.save(3, tree)
    checkpoints.close()
    assert checkpoints.steps() == [2, 3]


def test_save_returns_before_the_disk_and_wait_after(
    folder: Path, tree: Tree, disk: Any
) -> None:
    checkpoints = Checkpoints(folder)
    disk.release.clear()
    checkpoints.save(1, tree)
    assert checkpoints.latest() is None
    disk.release.set()
    checkpoints.wait()
    assert checkpoints.latest() == 1
    checkpoints.close()


def test_arrays_may_be_donated_and_deleted_after_save(
    folder: Path, mesh: Mesh, bits: Bits
) -> None:
    sharding = NamedSharding(mesh, P("data"))
    names = ("deleted", "donated")
    values = {name: np.full((1024, 1024), 3, np.float32) for name in names}
    # Arrays that lend NumPy their memory, or borrow it, can't be donated.
    make = jax.jit(lambda: jnp.full((1024, 1024), 3.0), out_shardings=sharding)
    tree = {name: make() for name in names}
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    overwrite.lower(tree["donated"]).compile()
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    tree["deleted"].delete()
    value = overwrite(tree.pop("donated"))
    for _ in range(10):
        value = overwrite(value)
    target = dict.fromkeys(
        names, jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=sharding)
    )
    assert bits(checkpoints.restore(target).tree) == bits(values)
    checkpoints.close()


def test_a_step_saved_twice_stays_as_it_was(
    folder: Path, tree: Tree, bits: Bits
) -> None:
    checkpoints = Checkpoints(folder)
    other = jax.tree.map(lambda leaf: leaf + 1, tree)
    checkpoints.save(2, tree)
    checkpoints.save(2, other)
    assert bits(checkpoints.restore(tree).tree) == bits(tree)
    checkpoints.save(2, other)
    again = Checkpoints(folder)
    again.restore(tree)
    again.save(2, other)
    assert bits(again.restore(tree).tree) == bits(tree)
    checkpoints.close()


def test_a_restored_run_goes_on_in_its_folder(folder: Path, tree: Tree) -> None:
    save(folder, 1, tree=tree)
    checkpoints = Checkpoints(folder)
    checkpoints.restore(tree)
    checkpoints.save(2, tree)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_another_run_is_refused_unless_forced(folder: Path, tree: Tree) -> None:
    save(folder, 1, tree=tree)
    before = everything_in(folder)
    checkpoints = Checkpoints(folder)
    with pytest.raises(ValueError, match=r"holds another run, up to step 1\. .*force="):
        checkpoints.save(2, tree)
    assert everything_in(folder) == before
    checkpoints.save(2, tree, force=True)
    checkpoints.save(3, tree)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2, 3]


@pytest.mark.parametrize("force", [False, True])
def test_another_tree_is_refused_and_nothing_lost(
    force: bool, folder: Path, tree: Tree
) -> None:
    save(folder, 1, tree=tree)
    before = everything_in(folder)
    with pytest.raises(ValueError, match="another model or optimizer") as raised:
        Checkpoints(folder).save(2, {"step": tree["step"]}, force=force)
    assert "of step 1 differ" in str(raised.value)
    assert "params/kernel: float32[16,4]" in str(raised.value)
    assert "Save to another folder" in str(raised.value)
    assert everything_in(folder) == before


def test_an_older_step_is_refused_with_the_remedy(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(5, tree)
    with pytest.raises(ValueError, match=r"step is 4.*step 5: .*newer.*Save to anot"):
        checkpoints.save(4, tree)
    checkpoints.close()
    with pytest.raises(ValueError, match=r"step is 5, .* must be newer"):
        Checkpoints(folder).save(5, tree, force=True)
    assert checkpoints.steps() == [5]


def test_a_failed_save_raises_once_and_leaves_the_rest(
    folder: Path,
    tree: Tree,
    disk: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    checkpoints.wait()
    disk.full = True
    checkpoints.save(2, tree)
    with pytest.raises(OSError, match=r"No space left.* is step 1; make room"):
        checkpoints.wait()
    checkpoints.wait()
    disk.full = False
    checkpoints.save(2, tree)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    assert sorted(os.listdir(folder)) == ["step_00000001", "step_00000002"]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_a_long_wait_is_no_alarm(
    folder: Path, tree: Tree, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        checkpoint_manager, "_WAIT_FOR_PREV_SAVE_WARNING_THRESHOLD_SECS", 0.0
    )
    save(folder, 1, 2, tree=tree)
    assert not caplog.records


def test_a_failed_save_raises_at_the_next_save(
    folder: Path, tree: Tree, disk: Any
) -> None:
    checkpoints = Checkpoints(folder)
    disk.full = True
    checkpoints.save(1, tree)
    with pytest.raises(OSError, match=r"No space left.*newest checkpoint there is non"):
        checkpoints.save(2, tree)


def test_a_save_lost_at_the_end_of_the_program_is_told(
    folder: Path, tree: Tree, disk: Any
) -> None:
    checkpoints = Checkpoints(folder)
    disk.full = True
    checkpoints.save(1, tree)
    with pytest.warns(UserWarning, match=r"call wait\(\) before it ends.*No space"):
        store._warn_of_lost_saves()
    store._warn_of_lost_saves()


def test_a_save_waited_for_is_not_told_of_at_the_end(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    assert checkpoints in store._unfinished
    checkpoints.close()
    assert checkpoints not in store._unfinished


def test_leftovers_of_a_killed_save_are_cleaned_up(folder: Path, tree: Tree) -> None:
    for ending in ("saving", "deleting"):
        (folder / f"step_00000009.{ending}" / "arrays").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}")
    assert Checkpoints(folder).latest() is None
    save(folder, 1, tree=tree)
    assert sorted(os.listdir(folder)) == ["metrics.jsonl", "step_00000001"]


def test_a_folder_that_is_a_file_is_refused(folder: Path, tree: Tree) -> None:
    folder.write_text("notes")
    with pytest.raises(NotADirectoryError, match=r"run' is a file; choose another"):
        Checkpoints(folder).save(1, tree)
    with pytest.raises(NotADirectoryError, match=r"below' can't hold .*run' is a file"):
        Checkpoints(folder / "below").save(1, tree)
    assert folder.read_text() == "notes"


def test_an_unwritable_folder_is_refused(
    folder: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(PermissionError, match=r"can't be written \(Read-only file sys"):
        Checkpoints(folder).save(1, tree)


def test_a_url_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"folder is 'gs://b/run'.*mount the bucket"):
        Checkpoints("gs://b/run")


def test_a_relative_folder_is_made_absolute(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("runs/a"), 1, tree=tree)
    assert (tmp_path / "runs/a/step_00000001").is_dir()


def test_keep_below_one_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="last=0 must be at least 1, or None for all"):
        Checkpoints(folder, keep=0)


def test_a_step_that_is_no_step_is_refused(folder: Path, tree: Tree) -> None:
    with pytest.raises(ValueError, match="step is -1; it must be at least 0"):
        Checkpoints(folder).save(-1, tree)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"bytes", "bytes is not JSON serializable"),
        ([{3: "three"}], "it has the key 3"),
    ],
)
def test_a_state_that_json_would_change_is_refused(
    value: Any, reason: str, folder: Path, tree: Tree
) -> None:
    checkpoints = Checkpoints(folder)
    with pytest.raises(TypeError, match=f"data_state must be made of None.*{reason}"):
        checkpoints.save(1, tree, data_state={"position": value})
    with pytest.raises(TypeError, match=f"meta must be made of None.*{reason}"):
        checkpoints.save(1, tree, meta={"position": value})
    assert not folder.exists()


def test_a_save_of_another_object_to_the_folder_is_waited_for(
    folder: Path, tree: Tree, disk: Any
) -> None:
    """As in a notebook, where a run was interrupted and is started again."""
    first, second = Checkpoints(folder), Checkpoints(folder)
    disk.release.clear()
    first.save(1, tree)
    threading.Timer(0.2, disk.release.set).start()
    assert second.restore(tree).step == 1
    second.save(2, tree)
    second.close()
    assert second.steps() == [1, 2]
