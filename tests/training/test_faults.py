"""Does a run on a disk that fails now and then end as if the disk were sound?"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.checkpoint.folder import (
    complete_steps,
    step_folders,
    step_path,
    verified,
)
from jaxpar.launch.exit_codes import SAVE_FAILED
from tests.faults import PRELOAD, SLOW_DISK, Faults, library
from tests.multiprocess.launching import (
    ROOT,
    Launched,
    command,
    final_files,
    run_to_the_end,
)
from tests.runs import events

RATE, REACH = 0.01, 150
"""Of the calls on the project's own files that fail; and in half of the saves, one of
so many first calls of Orbax."""
LIMIT_SECONDS = 120


def run_all(runs: Sequence[Faults], seconds: float) -> list[dict[str, Any]]:
    """What `tests.faulty_run` prints of runs that follow one that no disk disturbs."""
    whole = Faults(runs[0].folder.with_name("whole"))
    described = [vars(each) | {"folder": str(each.folder)} for each in (whole, *runs)]
    cache = jax.config.jax_compilation_cache_dir
    spec = {"cache": cache, "seconds": seconds, "limit": LIMIT_SECONDS}
    text = json.dumps({**spec, "runs": described})
    done = subprocess.run(
        [sys.executable, "-m", "tests.faulty_run", text],
        cwd=ROOT,
        env={**os.environ, PRELOAD: str(library())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]


def require_whole(runs: Sequence[Faults], seconds: float = 20.0) -> None:
    """Check that runs end equal to the bit, and leave only sound checkpoints."""
    whole, *found = run_all(runs, seconds)
    assert len(found) == len(runs)
    for each, end in zip(runs, found, strict=True):
        assert end["ended"] == "done", (each, end)
        assert end["state"] == whole["state"], each
        for step, path in step_folders(each.folder / "checkpoints").items():
            assert verified(path, step)
        assert each.told.read_text(), "something has failed"


@pytest.mark.thorough
def test_run_on_a_failing_disk_ends_equal_to_the_bit(tmp_path: Path) -> None:
    """One per cent of its own calls fail, one of Orbax's, and all for two seconds."""
    outage = (0.3, 2.0)
    require_whole(
        [
            Faults(tmp_path / "some", 1, RATE, REACH),
            Faults(tmp_path / "outage", 2, 0.0, 0, outage),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_runs_end_equal_to_the_bit(part: int, tmp_path: Path) -> None:
    seeds = range(20 * part, 20 * part + 20)
    runs = [Faults(tmp_path / str(seed), seed, RATE, REACH) for seed in seeds]
    # A disk that is away for half a minute, once in each part.
    runs[-1] = Faults(tmp_path / "away", part, RATE, REACH, (1.0, 30.0))
    require_whole(runs, seconds=60.0)


@pytest.mark.thorough
def test_signal_ends_a_run_whose_save_hangs_within_its_limit(tmp_path: Path) -> None:
    """A disk takes a write and never answers; the step before stays whole."""
    folder, limit = tmp_path / "run", 3.0
    cache = str(jax.config.jax_compilation_cache_dir)
    args = str(folder), str(limit), cache
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.training.hanging_run", *args],
        cwd=ROOT,
        env={**os.environ, PRELOAD: str(library())},
        stderr=subprocess.PIPE,
        text=True,
    )
    saved = step_path(folder / "checkpoints", 3)
    try:
        until = time.monotonic() + LIMIT_SECONDS
        while not list(folder.glob("checkpoints/step_00000006.saving*")):
            assert process.poll() is None
            assert time.monotonic() < until, "no save of step 6"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, said = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == SAVE_FAILED
    assert limit <= time.monotonic() - began < limit + 15
    assert "a signal asked for an end 3 s ago" in said
    assert verified(saved, 3)
    steps = complete_steps(folder / "checkpoints")
    assert max(steps) == 3
    (event,) = events(folder, "stopped")
    assert event["code"] == SAVE_FAILED


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seconds", "part"),
    [(0.1, ""), pytest.param(10, "/checkpoints", marks=pytest.mark.slow)],
    ids=str,
)
def test_run_on_a_slow_disk_ends_equal_to_the_bit(
    seconds: float, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call that writes takes so long, the supervisor's own too."""
    flags, out = ("--steps", "2", "--save-every", "2"), tmp_path / "slow"
    run_to_the_end(tmp_path / "fast", *flags, processes=1)
    monkeypatch.setenv(PRELOAD, str(library()))
    monkeypatch.setenv(SLOW_DISK, f"{seconds}:{out}{part}")
    with Launched(out, command(out, *flags)) as launched:
        assert launched.process.wait(timeout=3600) == 0, launched.output()[-6000:]
    assert final_files(out, 2) == final_files(tmp_path / "fast", 2)
    attempt = json.loads((out / "launch" / "attempt.json").read_text())
    assert attempt["number"] == 1, "nothing was taken for a stall"
