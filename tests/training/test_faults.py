"""Does a run on a disk that fails now and then end as if the disk were sound?"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpar.checkpoint.folder import step_folders, verified
from tests.faults import PRELOAD, Faults, library
from tests.multiprocess.launching import ROOT

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
