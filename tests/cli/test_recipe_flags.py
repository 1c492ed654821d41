"""Does `--mesh auto` run the search, and take the flags of the best?"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar.cli.recipe_flags import parse
from jaxpar.mesh import MeshShape


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
