"""Is `--mesh auto` searched, and is a wrong setting answered in a line?"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar.cli.recipe_flags import parse
from jaxpar.mesh import MeshShape

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    steps: int = 10
    """Training steps."""
    mesh: MeshShape = MeshShape()  # noqa: RUF009 - frozen
    """Devices by axis."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The searches that are started; each finds two meshes."""
    found: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> Any:
        assert not check
        found.append(command)
        file = Path(command[command.index("--json") + 1])
        ranking = [
            {"flags": ["--mesh.data", "4", "--mesh.tensor", "2"]},
            {"flags": ["--mesh.data", "8"]},
        ]
        file.write_text(json.dumps({"ranking": ranking}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_best_of_the_search_is_taken(commands) -> None:
    args = ["--mesh", "auto", "--target", "h200:1x8", "--steps", "3"]
    found = parse(Config, None, args)
    assert found == Config(steps=3, mesh=MeshShape(data=4, tensor=2))
    ((*command,),) = commands
    assert command[:4] == [sys.executable, "-m", "jaxpar", "plan"]
    assert Path(command[4]) == Path(__file__)
    assert command[command.index("--target") + 1] == "h200:1x8"
    assert "--search" in command
    assert command[command.index("--") + 1 :] == ["--steps", "3"]
    folder = Path(command[command.index("--json") + 1]).parent
    assert not folder.exists(), "it was for this search alone"


def test_config_without_auto_starts_no_search(commands) -> None:
    assert parse(Config, None, ["--mesh.data", "2"]).mesh == MeshShape(data=2)
    assert commands == []


def test_search_that_fails_ends_the_program(monkeypatch, capsys) -> None:
    def run(command: list[str], *, check: bool) -> Any:
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit) as stopped:
        parse(Config, None, ["--mesh", "auto", "--target", "h200:1x8"])
    assert stopped.value.code == 2
    assert "--mesh auto: no mesh was found" in capsys.readouterr().err


@pytest.mark.slow
def test_mesh_auto_stops_where_nothing_is_found(capfd):
    """The search says why: this file is no recipe."""
    with pytest.raises(SystemExit) as stopped:
        parse(Config, None, ["--mesh=auto", "--target", "h100:1x8"])
    assert stopped.value.code == 2
    said = " ".join(capfd.readouterr().err.split())
    assert "has no build; a recipe has a dataclass Config" in said
    assert "--mesh auto: no mesh was found" in said


RECIPE = """
import dataclasses, sys
from jaxpar.cli.recipe_flags import run_recipe
from jaxpar.launch.heartbeat import own_heartbeat

@dataclasses.dataclass(frozen=True)
class Config:
    step: int = 0
    tensorboard: bool = False

def main(config):
    if config.step:
        own_heartbeat().enter("step", config.step)
    error = ValueError("rows=3 must be even; give 4.")
    error.add_note("It is the loader's.")
    error.add_note("Set JAX_TRACEBACK_FILTERING=off to include jax's frames.")
    raise error

run_recipe(main, Config, "Fail.")
"""


def fails(tmp_path: Path, *flags: str, **environment: str) -> tuple[int, str]:
    script = tmp_path / "train.py"
    script.write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, str(script), *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.returncode, done.stderr


def test_wrong_setting_is_answered_in_a_line_with_a_code(tmp_path):
    assert fails(tmp_path) == (
        2,
        "train.py: rows=3 must be even; give 4.\nIt is the loader's.\n"
        "(--traceback shows where)\n",
    )


def test_missing_package_of_a_flag_is_said_before_the_recipe_starts(tmp_path):
    # The folder of the script comes first on the path.
    (tmp_path / "tensorboardX.py").write_text("import a_package_that_is_not_there")
    code, said = fails(tmp_path, "--tensorboard")
    assert code == 2
    assert said.startswith("train.py: TensorBoard (--tensorboard) needs tensorboardX, ")
    assert "pip install 'jaxpar[tensorboard]'" in said


@pytest.mark.parametrize("flags", [("--traceback",), ("--step=1",)])
def test_traceback_is_shown_where_asked_and_after_the_first_step(flags, tmp_path):
    code, said = fails(tmp_path, *flags)
    assert code == 1
    assert said.startswith("Traceback (most recent call last):")
    assert "ValueError: rows=3 must be even" in said


def test_recipes_of_ours_answer_in_a_line(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The square of {n} is {n * n}." for n in range(5000)))
    flags = ["--zero=4", f"--out={tmp_path / 'run'}", f"--data={text}"]
    done = subprocess.run(
        [sys.executable, "recipes/pretrain.py", *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("pretrain.py: zero=4 must be")
    assert "Traceback" not in done.stderr
