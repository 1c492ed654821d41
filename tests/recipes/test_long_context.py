"""Does the recipe of long text run, resume, reopen on one device and refuse?"""

import re
from pathlib import Path

import pytest

from jaxpar.cli.recipe_flags import parse
from jaxpar.models import tile_work_of
from recipes import long_context
from tests.recipes.programs import small_run, start, told

RECIPE = "recipes/long_context.py"
STEPS = 4
SMALL = ("--batch-size", "2", "--seq-len", "512", "--window", "128")


@pytest.mark.slow
def test_recipe_trains_on_a_pattern_and_resumes(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), *SMALL]
    first = start(RECIPE, *args)
    assert first.code == 0, first.text
    assert "pattern  longformer: " in first.text
    before, after = first.heldout("at step 0"), first.heldout(f"at step {STEPS}")
    assert after < before - 0.3
    assert first.heldout("reopened on one device") == pytest.approx(after, rel=2e-6)

    second = start(RECIPE, *args)
    assert second.code == 0, second.text
    assert second.heldout(f"at step {STEPS}") == after, "restored, then evaluated"

    third = start(RECIPE, *args, "--pattern", "sliding")
    assert third.code != 0
    assert "pattern is 'longformer' there, 'sliding' here" in third.text


def test_flags_that_its_help_gives_for_gpus_fit_together() -> None:
    flags = re.search(r"On GPUs:\s(.*?)\.\s", long_context.__doc__, re.DOTALL)
    assert flags is not None
    config = parse(long_context.Config, None, flags[1].split())
    model, pattern = long_context.model_of(config)
    assert model.seq_len == 32_768
    assert tile_work_of(pattern, model.seq_len, model.num_heads).active_tiles < 0.2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--pattern", "slide"), "pattern='slide': must be one of .*mean 'sliding'"),
        (
            ("--window", "100"),
            "window=100: must be a positive multiple of block=64.* is 128",
        ),
    ],
)
def test_what_is_no_pattern_is_refused(
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    own = ("--traceback", "--out", str(tmp_path / "run"))
    with pytest.raises(ValueError, match=message):
        told(monkeypatch, capsys, RECIPE, *args, *own)
    assert not (tmp_path / "run").exists()


def test_answers_in_windows_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = (f'{{"prompt": "{i}", "completion": "a"}}\n' for i in range(99))
    (tmp_path / "a.jsonl").write_text("".join(rows))
    args = ("--data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"prompts that are not learned"):
        told(monkeypatch, capsys, RECIPE, "--traceback", *args)
    assert not (tmp_path / "run").exists()
