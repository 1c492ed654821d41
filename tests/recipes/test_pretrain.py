"""Does the GPT recipe run, resume and refuse, as the program that users start?"""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.recipes.programs import logged_steps, small_run, start, told

RECIPE = "recipes/pretrain.py"
STEPS = 8


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    return [*small_run(tmp_path, STEPS), "--batch-size", "4", "--save-every", "3"]


def test_recipe_trains_moves_resumes_and_refuses(
    args: list[str], tmp_path: Path
) -> None:
    first = start(RECIPE, *args)
    assert first.code == 0, first.text
    before = first.heldout("at step 0")
    trained = first.heldout(f"at step {STEPS}")
    assert trained < before - 0.5
    for text in (
        "(ZeRO 3 on data 2 x tensor 2)\na device sends ",
        "(ZeRO 3 on data 4)\na device sends ",
        "400 tokens by the model",
    ):
        assert text in first.text
    moved = re.findall(r"held-out (\S+) at step 6\n", first.text)
    assert len(moved) == 2, "at the end of the first mesh, and reopened on the second"
    assert float(moved[0]) == pytest.approx(float(moved[1]), rel=2e-6)
    (per_byte,) = re.findall(r"held-out (\S+) nats a byte", first.text)
    run = tmp_path / "run"
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    text = (tmp_path / "heldout.txt").read_text()
    length = len(text) / len(tokenizer.encode(text).ids)
    assert float(per_byte) == pytest.approx(trained / length, abs=6e-4)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "sample.txt").read_text() in first.text

    second = start(RECIPE, *args)
    assert second.code == 0, second.text
    assert second.heldout(f"at step {STEPS}") == trained, "restored, then evaluated"
    assert "data 2 x" not in second.text, "the first mesh has nothing left to do"

    written = (run / "run.json").read_text()
    third = start(RECIPE, *args, "--learning-rate", "0.5")
    assert third.code != 0
    assert "learning_rate is 0.005 there, 0.5 here" in third.text
    assert "Choose another folder (--out)" in third.text
    assert (run / "run.json").read_text() == written
    assert logged_steps(run) == list(range(1, STEPS + 1))


def test_model_of_bytes_trains_on_bytes_and_has_suites(
    args: list[str], tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("Something else, in other words.\n" * 60)
    named = [f"same={tmp_path}/heldout.txt", f"other={tmp_path}/other.txt"]
    args += ["--model", "tiny", "--mesh.data", "2", "--suites", *named]
    done = start(RECIPE, *args)
    assert done.code == 0, done.text
    (found,) = re.findall(
        rf"held-out loss (\S+), same/loss (\S+), other/loss (\S+) at step {STEPS}",
        done.text,
    )
    assert found[0] == found[1] < found[2]
    assert done.text.count("a device stores") == 1
    assert not (tmp_path / "run/tokenizer.json").exists()


def test_rows_are_split_encoded_and_learned_without_other_flags(
    tmp_path: Path,
) -> None:
    rows = (f'{{"text": "What follows {i}? It is {i + 1}."}}\n' for i in range(1200))
    (tmp_path / "a.jsonl").write_text("".join([*rows, "{}\n"]))
    args = ["--data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "run")]
    args += ["--model", "tiny", "--mesh.data", "2", "--steps", "4"]
    args += ["--batch-size", "2", "--eval-batches", "1"]
    stopped = start(RECIPE, *args)
    assert stopped.code == 2
    assert "a.jsonl, line 1,201: has the fields none, not 'text' or" in stopped.text
    done = start(RECIPE, *args, "--bad-rows", "skip")
    assert done.code == 0, done.text
    assert "bad rows 1 of 1,201 rows skipped; the first: a.jsonl, line" in done.text
    assert re.search(
        r"held out \d+ of 1,200 documents, by a hash of their c", done.text
    )
    (tmp_path / "a.jsonl").write_text('{"text": "other rows"}\n' * 200)
    changed = start(RECIPE, *args, "--bad-rows", "skip", "--steps", "8")
    assert changed.code != 0
    assert "corpus_sha256 is " in changed.text


@pytest.mark.slow
def test_range_test_suggests_rates_and_draws_them(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, 40), "--batch-size", "4", "--model", "tiny"]
    args += ["--mesh.data", "2", "--decay", "range", "--learning-rate", "0.05"]
    done = start(RECIPE, *args)
    assert done.code == 0, done.text
    (found,) = re.findall(r"range    learning rates from (\S+) to ([\d.]+)", done.text)
    low, high = map(float, found)
    assert 0.005 <= low <= high <= 0.5
    assert (tmp_path / "run/lr_range.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_pipeline_trains_in_3d_and_goes_on_without_one(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), "--batch-size", "8", "--model", "tiny"]
    piped = ("--mesh.data", "2", "--mesh.pipe", "2", "--mesh.tensor", "2")
    first = start(RECIPE, *args, *piped, "--zero", "1", "--accumulate", "4")
    assert first.code == 0, first.text
    assert "(ZeRO 1 on data 2 x pipe 2 x tensor 2)" in first.text
    before = first.heldout("at step 0")
    trained = first.heldout(f"at step {STEPS}")
    assert trained < before - 0.5
    assert "400 tokens by the model" in first.text

    one = start(RECIPE, *args, "--mesh.data", "1", "--zero", "1", "--accumulate", "4")
    assert one.code == 0, one.text
    again = one.heldout(f"at step {STEPS}")
    assert again == pytest.approx(trained, rel=2e-6), "restored on one device"

    other = start(RECIPE, *args, *piped, "--schedule", "interleaved")
    assert other.code != 0
    assert "schedule is '1f1b' there, 'interleaved' here" in other.text
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))


def test_help_names_every_flag_and_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    zero, schedules = "ZeRO stage: 0, 1, 2 or 3", "interleaved:4"
    decays = "{cosine,linear,inverse_sqrt,wsd,range}"
    for text in (
        "--decay",
        decays,
        "--zero",
        zero,
        "--schedule",
        schedules,
        "The run's folder",
    ):
        assert text in ended.text


def test_misspelt_flag_is_answered_with_the_near_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--lerning-rate", "1e-3")
    assert ended.code == 2
    assert "--learning-rate" in ended.text


def test_answers_in_windows_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = (f'{{"prompt": "{i}", "completion": "a"}}\n' for i in range(99))
    (tmp_path / "a.jsonl").write_text("".join(rows))
    args = ("--data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"prompts that are not learned"):
        told(monkeypatch, capsys, RECIPE, "--traceback", *args)
    assert not (tmp_path / "run").exists()
