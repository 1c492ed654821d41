"""How is a recipe started: in a process of its own, or, to be told off, in this one?"""

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
LIMIT_SECONDS = 280


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    text: str

    def heldout(self, words: str) -> float:
        """The one held-out loss that is printed with these words."""
        (loss,) = re.findall(rf"held-out (\d+\.\d+) {words}", self.text)
        return float(loss)


def start(recipe: str, *args: str) -> Ended:
    """Run a recipe in a process of its own, to its end."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / recipe), *args],
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


def told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    recipe: str,
    *args: str,
) -> Ended:
    """What a recipe says to wrong or asking arguments, in this process."""
    jax.devices()  # Fixed before the recipe, for the tests that follow, asks for four.
    monkeypatch.setattr(sys, "argv", [recipe, *args])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / recipe), run_name="__main__")
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, captured.out + captured.err)


def small_run(folder: Path, steps: int) -> list[str]:
    """Arguments for a run of few steps on text that is soon learned."""
    line = "def square(x):\n    return x * x  # and so on\n"
    (folder / "train.txt").write_text(line * 400)
    (folder / "heldout.txt").write_text(line * 60)
    return [
        *("--out", str(folder / "run")),
        *("--data", str(folder / "train.txt")),
        *("--heldout", str(folder / "heldout.txt")),
        *("--steps", str(steps), "--eval-batches", "1"),
    ]


def logged_steps(run: Path) -> list[int]:
    (log,) = run.glob("*.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["step"] for row in rows if "train/loss" in row]
