"""Does the GPT recipe run, resume and refuse, as the program that users start?"""

from pathlib import Path

import pytest

from tests.recipes.programs import logged_steps, small_run, start, told

RECIPE = "recipes/gpt.py"
STEPS = 6


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    return [*small_run(tmp_path, STEPS), "--batch-size", "4"]


def test_recipe_trains_resumes_and_refuses(args: list[str], tmp_path: Path) -> None:
    first = start(RECIPE, *args)
    assert first.code == 0, first.text
    before = first.heldout("at step 0")
    trained = first.heldout(f"at step {STEPS}")
    assert trained < before - 0.5
    reopened = first.heldout("reopened on one device")
    assert reopened == pytest.approx(trained, rel=2e-6)
    assert "mesh     data 2 x pipe 1 x tensor 2" in first.text
    assert "200 bytes by the model" in first.text

    second = start(RECIPE, *args)
    assert second.code == 0, second.text
    assert second.heldout(f"at step {STEPS}") == trained, "restored, then evaluated"

    record = tmp_path / "run/run.json"
    written = record.read_text()
    third = start(RECIPE, *args, "--learning-rate", "0.5")
    assert third.code != 0
    assert "learning_rate is 0.002 there, 0.5 here" in third.text
    assert "Choose another folder (--out)" in third.text
    assert record.read_text() == written
    assert len(logged_steps(tmp_path / "run")) == STEPS


def test_help_names_every_flag_and_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in ("--zero", "ZeRO stage: 0, 1, 2 or 3", "--out", "The run's folder"):
        assert text in ended.text


def test_misspelt_flag_is_answered_with_the_near_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--lerning-rate", "1e-3")
    assert ended.code == 2
    assert "--learning-rate" in ended.text
