"""Is a worker that did not find the others refused, before it trains alone?"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.launch.exit_codes import REFUSED
from jaxpar.launch.worker_environment import Worker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lost(tmp_path: Path) -> Worker:
    """Told of another worker, and not how to find it."""
    return Worker(
        coordinator=None,
        processes=2,
        index=1,
        planned=2,
        address="127.0.0.1",
        local_devices=None,
        gpus=None,
        tls=None,
        folder=str(tmp_path),
        attempt=1,
        files=str(tmp_path),
    )


def run_script(worker: Worker, source: str) -> subprocess.CompletedProcess[str]:
    script = Path(worker.folder, "script.py")
    script.write_text(source)
    start = [sys.executable, "-m", "jaxpar.launch.worker", str(script)]
    return subprocess.run(
        [*start, "--steps", "3"],
        env={**os.environ, **worker.environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_lost_worker_is_refused_before_its_script_runs(lost: Worker) -> None:
    done = run_script(lost, "print('trains')")
    assert done.returncode == REFUSED, done.stderr
    assert "trains" not in done.stdout
    error = json.loads(lost.error.read_text())["error"]
    assert "worker 1 is one of 2 and has no coordinator" in error


def test_script_runs_as_if_it_had_been_started_itself(lost: Worker) -> None:
    source = "import sys; print(__name__, sys.argv[1:], sys.path[0])"
    worker = dataclasses.replace(lost, processes=1, index=0)
    done = run_script(worker, source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"__main__ ['--steps', '3'] {lost.folder}"
