"""Does the T5 recipe run, move to another mesh, resume and refuse?"""

import re
from pathlib import Path

import pytest

from tests.recipes.programs import logged_steps, small_run, start, told

RECIPE = "recipes/t5.py"
STEPS = 8
SMALL = ("--model", "tiny", "--batch-size", "4", "--input-len", "32")


@pytest.mark.slow
def test_recipe_trains_moves_resumes_and_refuses(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), *SMALL, "--save-every", "3"]
    first = start(RECIPE, *args)
    assert first.code == 0, first.text
    trained = first.heldout(f"at step {STEPS}")
    assert trained < first.heldout("at step 0") - 0.5
    assert "spans cut out" in first.text
    assert "(ZeRO 3 on data 2 x tensor 2)" in first.text
    assert "(ZeRO 3 on data 4)" in first.text
    moved = re.findall(r"held-out (\S+) at step 6\n", first.text)
    assert len(moved) == 2, "at the end of the first mesh, and reopened on the second"
    assert float(moved[0]) == pytest.approx(float(moved[1]), rel=2e-6)
    run = tmp_path / "run"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")

    second = start(RECIPE, *args)
    assert second.code == 0, second.text
    assert second.heldout(f"at step {STEPS}") == trained, "restored, then evaluated"

    third = start(RECIPE, *args, "--input-len", "48")
    assert third.code != 0
    assert "input_len is 32 there, 48 here" in third.text
    assert logged_steps(run) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_pipeline_trains_and_goes_on_on_one_device(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), *SMALL, "--zero", "1", "--accumulate", "2"]
    piped = ("--mesh.data", "2", "--mesh.pipe", "2", "--mesh.tensor", "2")
    first = start(RECIPE, *args, *piped, "--remat", "full")
    assert first.code == 0, first.text
    trained = first.heldout(f"at step {STEPS}")
    assert trained < first.heldout("at step 0") - 0.5
    one = start(RECIPE, *args, "--mesh.data", "1")
    assert one.code == 0, one.text
    assert one.heldout(f"at step {STEPS}") == pytest.approx(trained, rel=2e-6)


def test_help_names_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in ("--input-len", "Tokens that the encoder reads", "--zero"):
        assert text in ended.text


def test_prompts_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = (f'{{"prompt": "{i}", "completion": "a"}}\n' for i in range(99))
    (tmp_path / "a.jsonl").write_text("".join(rows))
    args = ("--data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"prompts that are not learned, but spans"):
        told(monkeypatch, capsys, RECIPE, "--traceback", *args)
    assert not (tmp_path / "run").exists()
