"""Is what comes back the newest whole step, of this model, and else an error?"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints

Tree = dict[str, Any]
Bits = Callable[[Any], list[bytes]]


@pytest.fixture
def checkpoints(folder: Path, tree: Tree) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in (1, 2, 3):
        checkpoints.save(step, {**tree, "step": jnp.int32(step)})
    checkpoints.close()
    return checkpoints


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_the_newest_step_comes_back_unless_one_is_named(
    checkpoints: Checkpoints, tree: Tree
) -> None:
    assert checkpoints.restore(tree).step == 3
    older = checkpoints.restore(tree, step=1)
    assert older.step == 1
    assert int(older.tree["step"]) == 1


def test_meta_and_data_state_come_back(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    data_state = {"epoch": 3, "indices": [1, 2, None], "rate": 0.1, "on": True}
    checkpoints.save(1, tree, data_state=data_state, meta={"zero": 3, "mesh": (4, 2)})
    restored = checkpoints.restore(tree)
    assert restored.data_state == data_state
    assert restored.meta == {"zero": 3, "mesh": [4, 2]}
    checkpoints.save(2, tree)
    restored = checkpoints.restore(tree)
    assert restored.data_state is None
    assert restored.meta == {}
    checkpoints.close()


def test_restore_waits_for_a_save_under_way(
    folder: Path, tree: Tree, disk: Any
) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    assert checkpoints.restore(tree).step == 1
    checkpoints.close()


@pytest.mark.parametrize("item", [".", "state", "data", "meta"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 0)])
def test_an_incomplete_step_is_skipped_with_a_warning(
    item: str,
    damage: Callable[[Path], None],
    checkpoints: Checkpoints,
    folder: Path,
    tree: Tree,
) -> None:
    damage(folder / "step_00000003" / item / "commit_success.txt")
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.latest() == 2
    with pytest.warns(UserWarning, match=r"skipped.*step_00000003; restoring step 2"):
        assert checkpoints.restore(tree).step == 2
    assert checkpoints.restore(tree, step=2).step == 2
    with pytest.raises(FileNotFoundError, match=r"03' is incomplete: .*steps, \[1, 2]"):
        checkpoints.restore(tree, step=3)


def test_an_incomplete_step_makes_way_for_the_next_save(
    checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    for _ in range(2):
        (folder / "step_00000003" / "commit_success.txt").unlink()
        again = Checkpoints(folder, keep=2)
        again.restore(tree, step=2)
        with pytest.warns(
            UserWarning, match=r"renamed to end in '.incomplete': step_0"
        ):
            again.save(3, tree)
        again.close()
    assert checkpoints.steps() == [2, 3]
    assert sorted(os.listdir(folder)) == [
        "step_00000002",
        "step_00000003",
        "step_00000003.incomplete",
        "step_00000003.incomplete.2",
    ]


def test_an_incomplete_older_step_is_deleted_in_turn(
    checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    (folder / "step_00000001" / "commit_success.txt").unlink()
    again = Checkpoints(folder, keep=2)
    again.restore(tree)
    again.save(4, tree)
    again.close()
    assert sorted(os.listdir(folder)) == ["step_00000003", "step_00000004"]


def test_a_folder_without_checkpoints_is_refused(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() is None
    assert checkpoints.steps() == []
    with pytest.raises(FileNotFoundError, match=r"run' has no complete.*; save one fi"):
        checkpoints.restore(tree)
    assert not folder.exists()
    (folder / "step_00000001").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"\(incomplete: step_00000001\); save"):
        checkpoints.restore(tree)


def test_a_step_that_does_not_exist_is_refused(
    checkpoints: Checkpoints, tree: Tree
) -> None:
    with pytest.raises(FileNotFoundError, match=r"09' does not exist; .* \[1, 2, 3\]"):
        checkpoints.restore(tree, step=9)


def test_a_checkpoint_of_another_model_is_refused_leaf_by_leaf(
    folder: Path, tree: Tree
) -> None:
    stored = {
        "same": jnp.ones(3),
        "shape": jnp.ones((2, 3)),
        "dtype": jnp.ones(2),
        "key": jax.random.key(0),
        "gone": [jnp.ones(1)] * 12,
    }
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, stored)
    target = {
        "same": stored["same"],
        "shape": jnp.ones((3, 2)),
        "dtype": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(0, impl="rbg"),
        "new": jnp.ones(()),
    }
    with pytest.raises(ValueError, match="which is of another model") as raised:
        checkpoints.restore(target)
    assert str(raised.value).splitlines()[1:] == [
        "  1 leaf is not in the checkpoint:",
        "    new: float32[]",
        "  12 leaves are only in the checkpoint:",
        *(f"    gone/{n}: float32[1]" for n in range(10)),
        "    and 2 more",
        "  3 leaves have another shape or dtype:",
        "    dtype: bfloat16[2], in the checkpoint float32[2]",
        "    key: key<rbg>[], in the checkpoint key<threefry2x32>[]",
        "    shape: float32[3,2], in the checkpoint float32[2,3]",
        "Build the same model and optimizer, or restore from another folder",
    ]
    checkpoints.close()


def test_a_target_without_sharding_is_refused(
    checkpoints: Checkpoints, tree: Tree
) -> None:
    target = {**tree, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(ValueError, match="target leaf 'step' has no sharding; give"):
        checkpoints.restore(target)


@pytest.mark.parametrize("states", [[{"at": 1}], [{"at": 1}] * 2, [None] * 3])
def test_equal_data_states_serve_any_number_of_processes(
    states: list[Any], checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    edit(folder / "step_00000003/data/data.json", lambda _: {"states": states})
    assert checkpoints.restore(tree).data_state == states[0]


def test_differing_data_states_are_refused_by_another_number_of_processes(
    checkpoints: Checkpoints, folder: Path, tree: Tree, bits: Bits
) -> None:
    states = {"states": [{"at": 1}, {"at": 2}]}
    edit(folder / "step_00000003/data/data.json", lambda _: states)
    restored = checkpoints.restore(tree)
    assert bits(restored.tree["params"]) == bits(tree["params"])
    with pytest.raises(
        ValueError, match=r"step 3 are of 2 processes.* has 1: .*with 2"
    ):
        _ = restored.data_state


def test_a_newer_format_is_refused(
    checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    meta = folder / "step_00000003/meta/meta.json"
    edit(meta, lambda content: content | {"format": 2})
    with pytest.raises(ValueError, match=r"has format 2, .* up to 1: update jaxpar"):
        checkpoints.restore(tree)


@pytest.mark.parametrize("name", ["meta/meta.json", "data/data.json"])
def test_a_damaged_file_is_named(
    name: str, checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    os.truncate(folder / "step_00000003" / name, 9)
    with pytest.raises(ValueError, match=rf"file '.*{name}' is damaged .*another step"):
        checkpoints.restore(tree)
    assert checkpoints.restore(tree, step=2).step == 2


def test_damaged_arrays_raise_and_name_the_other_steps(
    checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    for path in (folder / "step_00000003/state").rglob("d/*"):
        os.truncate(path, 3)
    with pytest.raises(ValueError, match="Error") as raised:
        checkpoints.restore(tree)
    assert "step_00000003' failed" in raised.value.__notes__[-1]
    assert "restore another step of [1, 2, 3]" in raised.value.__notes__[-1]
