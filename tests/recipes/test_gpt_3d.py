"""Does the recipe of the GPT in 3D run, resume, reopen on one stage and refuse?"""

from pathlib import Path

import pytest

from tests.recipes.programs import logged_steps, small_run, start, told

RECIPE = "recipes/gpt_3d.py"
STEPS = 6


@pytest.mark.slow
def test_recipe_trains_in_3d_resumes_and_refuses(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), "--batch-size", "8"]
    first = start(RECIPE, *args)
    assert first.code == 0, first.text
    assert "mesh     data 2 x pipe 2 x tensor 2" in first.text
    assert "schedule 1f1b of 4 micro-batches" in first.text
    before = first.heldout("at step 0")
    trained = first.heldout(f"at step {STEPS}")
    assert trained < before - 0.5
    reopened = first.heldout("reopened on one device")
    assert reopened == pytest.approx(trained, rel=2e-6)
    assert "200 bytes by the model" in first.text

    second = start(RECIPE, *args)
    assert second.code == 0, second.text
    assert second.heldout(f"at step {STEPS}") == trained, "restored, then evaluated"

    third = start(RECIPE, *args, "--schedule", "interleaved")
    assert third.code != 0
    assert "schedule is '1f1b' there, 'interleaved' here" in third.text
    assert "Choose another folder (--out)" in third.text
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_recipe_takes_another_schedule_mesh_and_stage(tmp_path: Path) -> None:
    ended = start(
        RECIPE,
        *small_run(tmp_path, STEPS),
        *("--schedule", "interleaved", "--zero", "3", "--batch-size", "8"),
        *("--mesh.data", "2", "--mesh.pipe", "2"),
    )
    assert ended.code == 0, ended.text
    assert "mesh     data 2 x pipe 2 x tensor 1" in ended.text
    assert "schedule interleaved of 4 micro-batches" in ended.text
    before, after = ended.heldout("at step 0"), ended.heldout(f"at step {STEPS}")
    assert after < before - 0.5


def test_help_names_every_flag_and_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in (
        "--schedule",
        "interleaved:4",
        "--accumulate",
        "Micro-batches a step",
        "The run's folder",
    ):
        assert text in ended.text


def test_misspelt_flag_is_answered_with_the_near_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--shedule", "gpipe")
    assert ended.code == 2
    assert "--schedule" in ended.text
