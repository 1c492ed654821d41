"""Does the recipe of experts train, change its mesh, report its routing and refuse?"""

import re
from pathlib import Path

import pytest

from tests.recipes.programs import logged_steps, small_run, start, told

RECIPE = "recipes/moe.py"
STEPS = 8
SMALL = ("--model.num-layers", "2", "--model.width", "32", "--model.seq-len", "32")


@pytest.mark.slow
def test_recipe_trains_moves_and_reports_its_routing(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), *SMALL, "--save-every", "3"]
    first = start(RECIPE, *args)
    assert first.code == 0, first.text
    trained = first.heldout(f"at step {STEPS}")
    assert trained < first.heldout("at step 0") - 0.5
    assert "(ZeRO 3 on data 2 x expert 2)" in first.text
    assert "(ZeRO 3 on data 4)" in first.text
    moved = re.findall(r"held-out (\S+) at step 6\n", first.text)
    assert len(moved) == 2, "at the end of the first mesh, and reopened on the second"
    assert float(moved[0]) == pytest.approx(float(moved[1]), rel=2e-6)
    loads = re.findall(r"busiest expert has (\S+) x the mean, 0\.0% are", first.text)
    assert len(loads) == 2
    assert all(1 <= float(load) <= 4 for load in loads)
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_experts_with_capacity_drop_tokens_in_a_pipeline(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), *SMALL, "--accumulate", "2", "--zero", "1"]
    piped = ("--mesh.data", "2", "--mesh.pipe", "2", "--mesh.expert", "2")
    capacity = ("--model.experts.capacity-factor", "0.5")
    done = start(RECIPE, *args, *piped, *capacity, "--remat", "full")
    assert done.code == 0, done.text
    (dropped,) = re.findall(r"x the mean, (\S+)% are dropped", done.text)
    assert float(dropped) >= 50


def test_model_without_experts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    args = ("--model", "1m", "--out", str(tmp_path / "run"))
    ended = told(monkeypatch, capsys, RECIPE, *args)
    assert ended.code
    assert "--model.experts.num 0: the model has no experts" in ended.text
    assert not (tmp_path / "run").exists()


def test_help_names_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in ("--model.experts.capacity-factor", "--mesh.expert", "1m-moe"):
        assert text in ended.text
