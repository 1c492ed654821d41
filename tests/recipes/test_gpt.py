"""Does the GPT recipe run, resume and refuse, as the program that users start?"""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes/gpt.py"
LIMIT_SECONDS = 280
STEPS = 6


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    text: str

    def heldout(self, words: str) -> float:
        """The one held-out loss that is printed with these words."""
        (loss,) = re.findall(rf"held-out (\d+\.\d+) {words}", self.text)
        return float(loss)


def start(*args: str) -> Ended:
    """Run the recipe in a process of its own, to its end."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, str(RECIPE), *args],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            **(cache if jax.config.jax_compilation_cache_dir else {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_SECONDS,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout)


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    line = "def square(x):\n    return x * x  # and so on\n"
    (tmp_path / "train.txt").write_text(line * 400)
    (tmp_path / "heldout.txt").write_text(line * 40)
    return [
        *("--out", str(tmp_path / "run")),
        *("--data", str(tmp_path / "train.txt")),
        *("--heldout", str(tmp_path / "heldout.txt")),
        *("--steps", str(STEPS), "--batch-size", "4", "--eval-batches", "1"),
    ]


def test_recipe_trains_resumes_and_refuses(args: list[str], tmp_path: Path) -> None:
    first = start(*args)
    assert first.code == 0, first.text
    before = first.heldout("at step 0")
    trained = first.heldout(f"nats per token at step {STEPS}")
    assert trained < before - 0.5
    reopened = first.heldout("reopened on one device")
    assert reopened == pytest.approx(trained, rel=2e-6)
    assert "mesh     data 2 x pipe 1 x tensor 2" in first.text
    assert "200 bytes by the model" in first.text

    second = start(*args)
    assert second.code == 0, second.text
    resumed = second.heldout(f"at step {STEPS}")
    assert resumed == pytest.approx(trained, abs=1e-4), "restored before it evaluates"
    assert second.heldout(f"nats per token at step {STEPS}") == trained

    record = tmp_path / "run/run.json"
    written = record.read_text()
    third = start(*args, "--learning-rate", "0.5")
    assert third.code != 0
    assert "learning_rate is 0.002 there, 0.5 here" in third.text
    assert "Choose another folder (--out)" in third.text
    assert record.read_text() == written
    assert len(logged_steps(tmp_path / "run")) == STEPS


def logged_steps(run: Path) -> list[int]:
    (log,) = run.glob("*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *args: str
) -> Ended:
    """What the recipe says to wrong or asking arguments, in this process."""
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *args])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPE), run_name="__main__")
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, captured.out + captured.err)


def test_help_names_every_flag_and_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, "--help")
    assert ended.code == 0
    for text in ("--zero", "ZeRO stage: 0, 1, 2 or 3", "--out", "The run's folder"):
        assert text in ended.text


def test_misspelt_flag_is_answered_with_the_near_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, "--lerning-rate", "1e-3")
    assert ended.code == 2
    assert "--learning-rate" in ended.text
