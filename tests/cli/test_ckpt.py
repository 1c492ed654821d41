"""Does ``jaxpar ckpt`` say what is there, what is damaged, and what leaves it?"""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpar.checkpoint import Checkpoints
from tests.cli.test_main import called, refused
from tests.commands import run_jaxpar


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = Checkpoints(tmp_path / "run")
    for step, metric in ((1, None), (2, 0.25)):
        params = {"dense": {"kernel": jnp.ones((30, 2)) * step}}
        tree = {"params": params, "step": jnp.int32(step)}
        checkpoints.save(step, tree, metric=metric, meta={"commit": "abc"})
    checkpoints.close()
    return tmp_path / "run"


def damage(folder: Path, step: int, size: int) -> str:
    file = next((folder / f"step_{step:08d}" / "arrays").rglob("d/*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.truncate(file, len(content) + size)
    return file.name


def test_steps_are_listed_with_size_and_metric(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    said = called(capsys, "ckpt", "ls", str(folder))
    rows = [line.split() for line in said.splitlines() if "verified" in line]
    assert [(row[0], row[4]) for row in rows] == [("1", "-"), ("2", "0.25")]
    damage(folder, 1, -1)
    said = called(capsys, "ckpt", "ls", str(folder))
    assert "files are missing or have another size" in said


def test_list_verifies_where_asked(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    name = damage(folder, 2, 0)
    assert "another" not in called(capsys, "ckpt", "ls", str(folder))
    said = called(capsys, "ckpt", "ls", str(folder), "--verify")
    assert f"{name}: another checksum" in said
    assert said.count("verified now") == 1


def test_leaves_are_shown_without_loading(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    said = called(capsys, "ckpt", "inspect", str(folder))
    assert "step 2 of run" in said
    assert "commit               abc" in said
    (row,) = [line.split() for line in said.splitlines() if "dense" in line]
    assert row == ["params/dense/kernel", "float32", "30x2", "240"]
    said = called(capsys, "ckpt", "inspect", str(folder), "--step", "1")
    assert "step 1 of run" in said


def test_damage_is_named_and_the_code_is_not_0(folder):
    assert run_jaxpar("ckpt", "verify", folder).returncode == 0
    name = damage(folder, 1, 0)
    done = run_jaxpar("ckpt", "verify", folder)
    assert done.returncode == 2
    assert f"{name}: another checksum" in done.stdout
    assert "step 2: verified now" in done.stdout
    assert "steps [1] can't be restored" in done.stderr


def test_parameters_are_exported_and_imported(folder, capsys, tmp_path):
    out = tmp_path / "out"
    said = called(capsys, "ckpt", "export", str(folder), str(out), "--dtype", "bf16")
    assert "model.safetensors" in said
    found = load_file(out / "model.safetensors")
    assert list(found) == ["dense.kernel"]
    assert np.array_equal(found["dense.kernel"], np.full((30, 2), 2))
    said = called(capsys, "ckpt", "import", str(tmp_path / "back"), str(out))
    assert "1 leaves in" in said
    assert 'only=["params/*"]' in said
    assert Checkpoints(tmp_path / "back").steps() == [0]


def test_adapters_are_exported_by_their_name(folder, capsys, tmp_path):
    leaves = {"lora": jnp.ones((2, 3))}
    checkpoints = Checkpoints(tmp_path / "tuned")
    checkpoints.save(1, {"params": leaves, "frozen": {"base": jnp.ones(4)}})
    checkpoints.close()

    def exported(source: Path, name: str, *flags: str) -> list[str]:
        out = tmp_path / name
        called(capsys, "ckpt", "export", str(source), str(out), *flags)
        return sorted(load_file(out / "model.safetensors"))

    tuned = tmp_path / "tuned"
    assert exported(tuned, "adapters", "--only", "adapters") == ["lora"]
    assert exported(tuned, "all") == ["base", "lora"]
    assert exported(tuned, "base", "--only", "frozen/*") == ["base"]
    none = str(tmp_path / "none")
    said = refused(capsys, "ckpt", "export", str(folder), none, "--only", "adapters")
    assert "no frozen parameters" in " ".join(said.split())


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_folder_of_the_run_will_do(command, folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    right = called(capsys, "ckpt", command, str(folder))
    folder.rename(folder.parent / "checkpoints")
    assert called(capsys, "ckpt", command, str(folder.parent)) == right


def test_settings_are_read_on_a_screen_of_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    meta = {"config": {"mesh": {"data": -1}, "text": "a long one " * 20, "none": {}}}
    checkpoints = Checkpoints(tmp_path)
    leaf = {"a_module_with_a_name/" * 4 + "kernel": jnp.ones(2)}
    checkpoints.save(1, {"params": leaf}, meta=meta)
    checkpoints.close()
    lines = called(capsys, "ckpt", "inspect", str(tmp_path)).splitlines()
    assert max(map(len, lines)) <= 80
    at = lines.index("config")
    assert lines[at + 1 : at + 3] == ["  mesh", "    data             -1"]
    assert sum("a long one" in line for line in lines) > 2
    assert "  none               {}" in lines


def test_exported_files_can_be_read_by_others(folder, capsys, tmp_path):
    called(capsys, "ckpt", "export", str(folder), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_folder_that_is_none_is_refused(command, capsys, tmp_path):
    assert "is not a folder" in refused(capsys, "ckpt", command, str(tmp_path / "none"))
    if command != "ls":
        said = refused(capsys, "ckpt", command, str(tmp_path))
        assert "holds no checkpoints" in said
