"""Does a folder belong to one run, are its steps in order, and is no save lost?"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.checkpoint import Checkpoints, store
from jaxpar.checkpoint.folder import metrics
from tests.checkpoint.saves import save

Tree = dict[str, Any]
Bits = Callable[[Any], list[bytes]]


def everything_in(folder: Path) -> dict[Path, bytes | None]:
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


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
    with pytest.raises(
        ValueError, match=r"holds another run, up to step 1\. .*or restore "
    ):
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


@pytest.mark.parametrize("url", ["hdfs://b/run", "s3://b", "s3://b//run"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=rf"folder is '{url}'.* s3://bucket/folder"):
        Checkpoints(url)


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


@pytest.mark.parametrize(
    ("metric", "stored"),
    [(0.5, 0.5), (None, None), (float("nan"), None), (float("inf"), None)],
)
def test_metric_that_can_not_be_ordered_is_none(
    metric: float | None, stored: float | None, folder: Path, tree: Tree
) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree, metric=metric)
    checkpoints.close()
    assert metrics(folder) == {1: stored}


def test_meta_is_read_without_the_arrays(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, tree, meta={"mesh": [2, 1], "note": None})
    checkpoints.close()
    assert Checkpoints(folder).meta(3) == {"mesh": [2, 1], "note": None}


@pytest.mark.usefixtures("unchecked_types")
def test_step_is_any_integer(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(np.int64(2), tree)
    checkpoints.close()
    assert checkpoints.steps() == [2]
    with pytest.raises(TypeError, match="'float' object"):
        checkpoints.save(2.5, tree)
