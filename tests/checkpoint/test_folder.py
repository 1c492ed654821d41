"""Which folders are steps, which may be restored, and what is set aside or deleted?"""

import errno
from pathlib import Path

import pytest

from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint.manifest import DamagedError, Manifest, seal
from jaxpar.launch.lease import take_lease


def save(folder: Path, step: int, text: str = "bytes", **fields) -> Path:
    """A step of one file, as a save leaves it."""
    path = files.step_path(folder, step)
    path.mkdir(parents=True)
    (path / "data").write_text(text)
    manifest = {"leaves": {}, "data_states": [], "meta": {}, "versions": {}} | fields
    seal(path, Manifest(**{"step": step, "run": "r", "metric": None} | manifest))
    return path


def test_only_folders_with_the_name_of_a_step_are_steps(tmp_path):
    for name in ("step_00000003", "step_123456789", "step_3", "step_00000004.saving"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000005").write_text("a file")
    (tmp_path / "step_00000006").symlink_to(tmp_path / "step_00000003")
    assert list(files.step_folders(tmp_path)) == [123456789, 3]
    assert files.step_folders(tmp_path / "absent") == {}
    assert files.saving_path(tmp_path, 3).name == "step_00000003.saving"
    take_lease(tmp_path / "run").give_back()
    own = files.saving_path(tmp_path / "run" / "checkpoints", 3)
    assert own.name == "step_00000003.saving.1"


def test_newest_sound_step_is_chosen_and_the_others_are_named(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    files.step_path(tmp_path, 4).mkdir()
    (files.step_path(tmp_path, 3) / "data").write_text("other")
    found = files.choose(tmp_path, None)
    assert found["step"] == 2
    (first, second) = found["skipped"]
    assert first == [4, "step_00000004 has no manifest"]
    assert second[0] == 3
    assert "data: another checksum" in second[1]


def test_step_that_is_asked_for_is_not_replaced_by_another(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "data").unlink()
    with pytest.raises(DamagedError, match=r"data: is missing; restore another .* \[1"):
        files.choose(tmp_path, 2)
    with pytest.raises(FileNotFoundError, match=r"does not exist; .* \[1, 2\]"):
        files.choose(tmp_path, 5)
    files.step_path(tmp_path, 6).mkdir()
    with pytest.raises(FileNotFoundError, match="has no manifest; restore one of the"):
        files.choose(tmp_path, 6)


def test_folder_without_a_sound_step_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint; save one"):
        files.choose(tmp_path, None)
    files.step_path(tmp_path, 7).mkdir()
    with pytest.raises(FileNotFoundError, match="without a manifest: step_00000007"):
        files.choose(tmp_path, None)
    (save(tmp_path, 8) / "data").unlink()
    with pytest.raises(DamagedError, match="there is no other step"):
        files.choose(tmp_path, None)


def test_step_of_another_number_is_damaged(tmp_path):
    save(tmp_path, 1).rename(files.step_path(tmp_path, 2))
    with pytest.raises(DamagedError, match=r"manifest\.json: is of step 1"):
        files.verified(files.step_path(tmp_path, 2), 2)


def test_long_lists_of_damage_are_cut(tmp_path):
    path = save(tmp_path, 1)
    for number in range(12):
        (path / f"extra-{number:02}").touch()
    with pytest.raises(DamagedError, match=r"extra-09: is not a file .*; and 2 more"):
        files.verified(path, 1)


def test_unreadable_manifests_are_looked_for_from_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (4, 3, 1):
        (files.step_path(tmp_path, step) / "manifest.json").write_text("{")
    assert files.unreadable_newest(tmp_path, set()) == {3, 4}
    assert files.unreadable_newest(tmp_path, {4}) == {3}


def test_damaged_steps_make_way_under_a_new_name(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    for step in (0, 4):  # A deletion that was interrupted, and an unfinished copy.
        files.step_path(tmp_path, step).mkdir()
    (tmp_path / "step_00000003.damaged").mkdir()
    assert files.set_aside(tmp_path, [3]) == ["step_00000003", "step_00000004"]
    assert (tmp_path / "step_00000003.damaged.2" / "data").exists()
    assert list(files.step_folders(tmp_path)) == [2, 1, 0]


def test_remains_are_cleaned_up_and_nothing_else(tmp_path):
    left = ("step_00000001.saving", "step_00000002.deleting", "step_00000003.saving.7")
    for name in (*left, "notes.saving"):
        (tmp_path / name).mkdir()
    save(tmp_path, 3)
    files.delete_step(tmp_path, 3)
    files.clean_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.saving"]


def test_metrics_are_of_complete_steps(tmp_path):
    save(tmp_path, 1, metric=0.5)
    save(tmp_path, 2)
    (save(tmp_path, 3, metric=1.0) / "manifest.json").write_text("{")
    files.step_path(tmp_path, 4).mkdir()
    assert files.metrics(tmp_path) == {3: None, 2: None, 1: 0.5}


def test_save_that_does_not_fit_is_refused(tmp_path):
    files.require_room(tmp_path, 1, 1000)
    with pytest.raises(
        OSError, match=r"step 1 needs .* nothing was written"
    ) as refused:
        files.require_room(tmp_path, 1, 10**18)
    assert refused.value.errno == errno.ENOSPC


def test_folder_is_made_unless_a_file_is_in_the_way(tmp_path):
    files.make_writable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(
        NotADirectoryError, match=r"'.*/file' is a file; choose another"
    ):
        files.make_writable(tmp_path / "file" / "below")
