"""Can a checkpoint from anywhere do harm: crash, write elsewhere, take all memory?"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.checkpoint import Checkpoints, manifest
from jaxpar.checkpoint.arrays import array_name
from jaxpar.checkpoint.manifest import DamagedError, is_inside
from tests.checkpoint import mutations

ROOT = Path(__file__).resolve().parents[2]


LONG = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6)]


@pytest.mark.parametrize("seed", [0, *LONG])
def test_mutated_checkpoints_are_refused_and_do_no_harm(
    seed: int, tmp_path: Path
) -> None:
    """100 each; a file's bytes may be changed with all checksums made to fit."""
    inside = tmp_path / "x" / "y"
    inside.mkdir(parents=True)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.mutations", inside, str(seed), "100"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    counted = found["counted"]
    assert sum(counted.values()) == 100
    assert not {"file: read", "link: read"} & counted.keys()
    assert not any(said.endswith("says nothing") for said in counted)
    assert found["taken"] < mutations.MEMORY_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["y"]


@pytest.mark.parametrize("name", mutations.EVIL_NAMES[:-1])
def test_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    assert not is_inside(name)
    mutations.make(tmp_path)
    step = tmp_path / "step_00000001"
    content = json.loads((step / manifest.MANIFEST).read_text())
    content["files"][name] = [0, "0" * 32]
    text = json.dumps(content).encode()
    (step / manifest.MANIFEST).write_bytes(text)
    (step / manifest.DIGEST).write_text(manifest.digest(text))
    with pytest.raises(DamagedError, match="the name leaves the folder"):
        Checkpoints(tmp_path).restore(mutations.target())


def test_a_leaf_whose_name_leaves_the_folder_is_stored_inside(tmp_path: Path) -> None:
    tree = {
        "../evil": mutations.target()["leaf0"],
        "a": {"..": mutations.target()["step"]},
    }
    checkpoints = Checkpoints(tmp_path / "runs")
    checkpoints.save(1, tree)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert set(Checkpoints(tmp_path / "runs").restore(tree).tree) == set(tree)
    assert len(array_name("x" * 4000)) < 255
    assert array_name("x" * 4000) != array_name("x" * 4001)


def test_a_declared_size_beyond_the_files_is_refused_before_anything_is_made(
    tmp_path: Path,
) -> None:
    mutations.make(tmp_path)
    step = tmp_path / "step_00000001"
    content = json.loads((step / manifest.MANIFEST).read_text())
    content["leaves"]["leaf0"]["shape"] = [67_000_000]
    text = json.dumps(content).encode()
    (step / manifest.MANIFEST).write_bytes(text)
    (step / manifest.DIGEST).write_text(manifest.digest(text))
    with pytest.raises(DamagedError, match=r"leaves of 268,000,\d+ bytes in files of"):
        Checkpoints(tmp_path).restore(mutations.target())


def test_links_are_not_followed(tmp_path: Path) -> None:
    mutations.make(tmp_path / "a")
    step = tmp_path / "a" / "step_00000001"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "step_00000001").symlink_to(step)
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint"):
        Checkpoints(tmp_path / "b").restore(mutations.target())
    file = next((step / "arrays").rglob("d/*"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match=f"{file.name}: is a link or not a regular"):
        Checkpoints(tmp_path / "a").restore(mutations.target())


def test_nothing_of_a_checkpoint_is_pickled() -> None:
    """No module that reads one imports pickle, nor yaml."""
    for path in (ROOT / "jaxpar" / "checkpoint").glob("*.py"):
        text = path.read_text()
        assert "pickle" not in text, path
        assert "yaml" not in text, path
        assert "eval(" not in text, path
