"""Is what comes back the newest whole step, of this model, and else an error?"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints, DamagedError, manifest

Tree = dict[str, Any]
Bits = Callable[[Any], list[bytes]]


@pytest.fixture
def checkpoints(folder: Path, tree: Tree) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in (1, 2, 3):
        checkpoints.save(step, {**tree, "step": jnp.int32(step)})
    checkpoints.close()
    return checkpoints


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


@pytest.mark.parametrize("name", ["manifest.json", "manifest.xxh3"])
def test_a_step_without_a_manifest_is_skipped_with_a_warning(
    name: str, checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    (folder / "step_00000003" / name).unlink()
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.latest() == 2
    with pytest.warns(UserWarning, match=r"step_00000003 has no manifest: restoring"):
        restored = checkpoints.restore(tree)
    assert restored.step == 2
    assert restored.skipped == {3: "step_00000003 has no manifest"}
    assert checkpoints.restore(tree, step=2).step == 2
    with pytest.raises(FileNotFoundError, match=r"03' has no manifest; .*, \[1, 2]"):
        checkpoints.restore(tree, step=3)


@pytest.mark.parametrize("file", ["manifest.json", "arrays"])
def test_a_damaged_step_makes_way_for_the_next_save(
    file: str, checkpoints: Checkpoints, folder: Path, tree: Tree, bits: Bits
) -> None:
    for _ in range(2):
        step = folder / "step_00000003"
        damaged = [p for p in step.rglob("*") if file in str(p) and p.is_file()]
        os.truncate(damaged[0], 1)
        again = Checkpoints(folder, keep=2)
        with pytest.warns(UserWarning, match="restoring step 2"):
            again.restore(tree)
        with pytest.warns(UserWarning, match=r"renamed to end in '.damaged': step_0"):
            again.save(3, tree)
        again.close()
        assert bits(Checkpoints(folder).restore(tree, step=3).tree) == bits(tree)
    assert checkpoints.steps() == [2, 3]
    assert sorted(os.listdir(folder)) == [
        "step_00000002",
        "step_00000003",
        "step_00000003.damaged",
        "step_00000003.damaged.2",
    ]


def test_an_older_step_without_a_manifest_stays_out_of_the_way(
    checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    (folder / "step_00000001" / "manifest.json").unlink()
    again = Checkpoints(folder, keep=2)
    again.restore(tree)
    again.save(4, tree)
    again.close()
    assert checkpoints.steps() == [3, 4]


def test_a_folder_without_checkpoints_is_refused(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest() is None
    assert checkpoints.steps() == []
    with pytest.raises(FileNotFoundError, match=r"run' has no complete.*; save one fi"):
        checkpoints.restore(tree)
    assert not folder.exists()
    (folder / "step_00000001").mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match=r"\(without a manifest: step_00000001\)"
    ):
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
        "Build the same model and optimizer, read only some leaves (only=, reset=, "
        "rename=), or restore from another folder",
    ]
    checkpoints.close()


def test_a_target_without_sharding_is_refused(
    checkpoints: Checkpoints, tree: Tree
) -> None:
    target = {**tree, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(ValueError, match="target leaf 'step' has no sharding; give"):
        checkpoints.restore(target)


def reseal(folder: Path, step: int, **changes: Any) -> None:
    """Write another manifest that fits its files, as whoever means harm could."""
    path = folder / f"step_{step:08d}"
    found = manifest.read_manifest(path)
    for name in (manifest.MANIFEST, manifest.DIGEST):
        (path / name).unlink()
    manifest.seal(path, dataclasses.replace(found, files={}, **changes))


@pytest.mark.parametrize("states", [[{"at": 1}], [{"at": 1}] * 2, [None] * 3])
def test_equal_data_states_serve_any_number_of_processes(
    states: list[Any], checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    reseal(folder, 3, data_states=states)
    assert checkpoints.restore(tree).data_state == states[0]


def test_differing_data_states_are_refused_by_another_number_of_processes(
    checkpoints: Checkpoints, folder: Path, tree: Tree, bits: Bits
) -> None:
    reseal(folder, 3, data_states=[{"at": 1}, {"at": 2}])
    restored = checkpoints.restore(tree)
    assert bits(restored.tree["params"]) == bits(tree["params"])
    with pytest.raises(
        ValueError, match=r"step 3 are of 2 processes.* has 1: .*with 2"
    ):
        _ = restored.data_state


def test_a_newer_format_is_refused(
    checkpoints: Checkpoints,
    folder: Path,
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 3)
    reseal(folder, 3)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has format 3, .* up to 2: update jaxpar"):
        checkpoints.restore(tree)


def test_a_damaged_step_that_is_named_is_refused_with_its_files(
    checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    file = next((folder / "step_00000003/arrays").rglob("d/*"))
    os.truncate(file, 3)
    name = file.relative_to(folder / "step_00000003").as_posix()
    with pytest.raises(DamagedError, match=rf"03' is damaged: {name}: has 3 bytes"):
        checkpoints.restore(tree, step=3)
    with pytest.raises(DamagedError, match=r"restore another step of \[1, 2\]"):
        checkpoints.restore(tree, step=3)


def test_a_folder_with_nothing_sound_left_names_every_damage(
    checkpoints: Checkpoints, folder: Path, tree: Tree
) -> None:
    for step in (1, 2, 3):
        os.truncate(folder / f"step_{step:08d}" / "manifest.json", 0)
    with pytest.raises(DamagedError, match="there is no other step") as raised:
        checkpoints.restore(tree)
    for step in (1, 2, 3):
        assert f"step_{step:08d}/manifest.json' is damaged" in str(raised.value)


def test_parameters_alone_are_read_and_the_rest_stays(
    folder: Path, tree: Tree, bits: Bits
) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    target = {**tree, "step": jnp.int32(99), "new": jnp.ones(3)}
    restored = checkpoints.restore(target, only=["params/*"])
    assert bits(restored.tree["params"]) == bits(tree["params"])
    assert int(restored.tree["step"]) == 99
    assert restored.tree["new"] is target["new"]


def test_leaves_are_reset_only_where_asked(folder: Path, tree: Tree) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {**tree, "opt": {"mu": jnp.ones(2)}})
    target = {**tree, "opt": {"nu": jnp.ones(5)}}
    with pytest.raises(ValueError, match=r"1 leaf is not in .*\n    opt/nu"):
        checkpoints.restore(target)
    restored = checkpoints.restore(target, reset=["opt/*"])
    assert restored.tree["opt"]["nu"] is target["opt"]["nu"]
    assert int(restored.tree["step"]) == 7


def test_renamed_leaves_are_found_by_their_old_names(
    folder: Path, tree: Tree, bits: Bits
) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    target = {"weights": tree["params"], "step": tree["step"]}
    restored = checkpoints.restore(target, rename={"weights/*": "params/*"})
    assert bits(restored.tree["weights"]) == bits(tree["params"])
    with pytest.raises(ValueError, match=r"not in the checkpoint:\n    params/kern: "):
        checkpoints.restore(target, rename={"weights/kernel": "params/kern"})
