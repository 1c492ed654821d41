"""Does `jaxpar plan` refuse early, write what was asked for, and tell each step?"""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxpar import progress
from jaxpar.cli import plan as module
from jaxpar.cli.main import main
from jaxpar.cli.plan import ShowPlan, show_plan
from jaxpar.planner import recipe, recipe_search
from tests.planner.handmade import GB, make_plan


def refused(capsys, *args) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert caught.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--target", "h20:1x8"), "'h20' must be one of a100, b200, h100, h200"),
        (("--target", "cpu"), "target='cpu' must be cpu:N"),
    ],
)
def test_wrong_target_is_said_before_the_recipe_is_read(capsys, args, message):
    assert message in refused(capsys, "plan", "nowhere.py", *args)


@pytest.mark.parametrize("flag", ["--json", "--png", "--html"])
def test_folder_of_a_file_is_looked_for_before_anything_compiles(
    capsys, tmp_path, flag
) -> None:
    file = tmp_path / "missing" / f"plan.{flag.removeprefix('--')}"
    said = refused(capsys, "plan", "nowhere.py", "--target", "cpu:2", flag, file)
    assert said.startswith(f"jaxpar: {flag} {file}: the folder")
    assert "make it first" in said


@pytest.mark.parametrize("flag", ["--png", "--html"])
def test_picture_is_refused_before_anything_compiles(
    capsys, tmp_path, monkeypatch, flag
) -> None:
    asked = "plan", "nowhere.py", "--target", "cpu:2", flag
    said = refused(capsys, *asked, tmp_path / "plan.gif")
    assert said.startswith(f"jaxpar: {flag} {tmp_path}/plan.gif must end in .")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refused(capsys, *asked, "plan.png")
    assert said == (
        f"jaxpar: {flag} needs matplotlib, which is not installed: "
        "pip install 'jaxpar[plot]'"
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is planned, and what is tried to make it fit; nothing compiles."""
    found: list[tuple] = []

    def plan(path: Path, target: str, flags: Any) -> Any:
        found.append(("plan", path, target, flags))
        memory = 150 * GB if target == "h200:8x8" else 60 * GB
        return make_plan(target=target, device_memory_bytes=memory)

    def would_fit(path: Path, plan: Any, flags: Any, *, report: Any) -> list:
        found.append(("fit", path, plan.target, flags))
        report("zero 3", plan)
        return []

    monkeypatch.setattr(recipe, "plan_in_subprocess", plan)
    monkeypatch.setattr(recipe_search, "what_would_fit", would_fit)
    return found


def test_plan_is_printed_and_written(asked, capsys, tmp_path) -> None:
    args = ShowPlan(Path("pretrain.py"), "h200:8x8", json=tmp_path / "plan.json")
    show_plan(args)
    assert asked == [("plan", Path("pretrain.py"), "h200:8x8", ())]
    assert "h200:8x8: 64 devices" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True


@pytest.mark.parametrize("fix", [True, False])
def test_plan_that_does_not_fit_is_followed_by_what_may_fit(
    asked, capsys, monkeypatch, fix
) -> None:
    monkeypatch.setattr("jaxpar.show.search.show_tried", lambda *_: None)
    flags = ("--zero", "2")
    show_plan(ShowPlan(Path("pretrain.py"), "h100:8x8", fix=fix, flags=flags))
    own = Path("pretrain.py"), "h100:8x8", flags
    assert asked == [("plan", *own), *([("fit", *own)] if fix else [])]


def test_each_compiled_step_is_told_in_a_line() -> None:
    said: list[str] = []
    report = module._reporter(said.append)
    report("data 8", make_plan())
    report("data 4", make_plan(device_memory_bytes=60 * GB, estimate=None))
    report("data 2", "RESOURCE_EXHAUSTED: no memory\nof a long trace")
    assert said == [
        "data 8: 5 s a step, 75.0 GB, fits",
        "data 4: 75.0 GB, does not fit",
        "data 2: failed: RESOURCE_EXHAUSTED: no memory",
    ]


def test_a_search_into_a_file_says_on_standard_error_what_it_does(
    capsys, monkeypatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    out = io.StringIO()
    with module._status(Console(file=out), "surveying pretrain.py on cpu:8"):
        pass
    assert out.getvalue() == ""
    assert "surveying pretrain.py on cpu:8: 0 s" in capsys.readouterr().err
