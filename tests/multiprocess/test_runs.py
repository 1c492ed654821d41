"""Do the processes of a run end, skip and go on together?"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpar.checkpoint.folder import complete_steps, step_path, verified
from jaxpar.launch.exit_codes import STOPPED
from tests.multiprocess.launching import ROOT, environment
from tests.multiprocess.test_training import end
from tests.runs import SAVE_EVERY, bits, events, fresh, losses, run_in

PROCESSES, DEVICES = 2, 4
LIMIT_SECONDS = 120
ENDLESS = 10**6

pytestmark = pytest.mark.multiprocess


class Together:
    """Processes of one run."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        nan: tuple[int, ...] = (),
        *,
        shared: bool = True,
        save_every: int = SAVE_EVERY,
        fails: int | None = None,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        spec: dict[str, Any] = {
            "coordinator": coordinator,
            "count": PROCESSES,
            "devices": DEVICES,
            "folder": str(folder),
            "steps": steps,
            "nan": nan,
            "save_every": save_every,
            "fails": fails,
        }
        self.folder, self.processes = folder, []
        folder.parent.mkdir(exist_ok=True)
        for index in range(PROCESSES):
            if index and not shared:  # As the same path on a disk of its own.
                spec["folder"] = f"{folder}-of-{index}"
            text = json.dumps(spec | {"index": index})
            with folder.with_suffix(f".{index}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.multiprocess.run_worker", text],
                        cwd=ROOT,
                        env=environment(),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> "Together":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            end(process)

    def wait_for_step(self, step: int) -> None:
        """Return when so many steps are logged."""
        until = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < until:
            path = self.folder / "metrics.jsonl"
            if path.exists() and path.read_text().count("\n") >= step:
                return
            codes = [process.poll() for process in self.processes]
            assert codes == [None] * PROCESSES, self.output()
            try:
                self.processes[0].wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
        pytest.fail(f"no step {step}: {self.output()}")

    def codes(self) -> list[int]:
        return [process.wait(timeout=LIMIT_SECONDS) for process in self.processes]

    def output(self) -> str:
        logs = sorted(self.folder.parent.glob(f"{self.folder.name}.*.log"))
        return "\n".join(f"-- {log.name}\n{log.read_text()[-4000:]}" for log in logs)


def state_of(folder: Path) -> list[bytes]:
    engine = fresh()
    run_in(folder).resume(engine)
    return bits(engine)


@pytest.mark.slow
def test_signal_to_one_process_ends_all_at_one_saved_step(tmp_path: Path) -> None:
    """Then the run goes on, and ends as one that was not interrupted."""
    folder = tmp_path / "halves"
    with Together(folder, ENDLESS) as run:
        run.wait_for_step(3)
        os.kill(run.processes[1].pid, signal.SIGTERM)
        assert run.codes() == [STOPPED] * PROCESSES, run.output()
    (event,) = events(folder, "stopped")
    at = event["step"]
    assert run_in(folder).resume(fresh()) == at
    for path in (folder, tmp_path / "whole"):
        with Together(path, at + 5) as run:
            assert run.codes() == [0] * PROCESSES, run.output()
    assert state_of(folder) == state_of(tmp_path / "whole")
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.thorough
def test_save_that_fails_in_one_process_is_tried_again_by_all_at_once(
    tmp_path: Path,
) -> None:
    """The first one waited for the second for 20 minutes."""
    folder, every = tmp_path / "failed", 12
    with Together(folder, 2 * every, save_every=every, fails=1) as run:
        assert run.codes() == [0] * PROCESSES, run.output()
    (failed,) = events(folder, "save failed")
    assert "process 1: OSError(5, 'Input/output error')" in failed["why"]
    assert "process 0" not in failed["why"]
    again = failed["step"]
    assert every < again < 2 * every
    steps = [0, again, 2 * every]
    assert sorted(complete_steps(folder / "checkpoints")) == steps
    for step in steps:
        assert verified(step_path(folder / "checkpoints", step), step)
    with Together(tmp_path / "whole", 2 * every, save_every=every) as run:
        assert run.codes() == [0] * PROCESSES, run.output()
    assert state_of(folder) == state_of(tmp_path / "whole")


@pytest.mark.slow
def test_nan_in_one_process_is_skipped_and_rolled_back_in_all(tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    with Together(folder, 24, nan=(9, 14, 15, 16)) as run:
        assert run.codes() == [0] * PROCESSES, run.output()
    assert [e["batch"] for e in events(folder, "skipped")] == [9, 14, 15, 16]
    (back,) = events(folder, "rolled back")
    assert back["left_out"] == [14, 15, 16]
    assert sorted(losses(folder)) == list(range(1, 25))


@pytest.mark.slow
def test_folder_that_is_not_shared_is_found_before_the_first_step(tmp_path: Path):
    folder = tmp_path / "own"
    with Together(folder, 3, shared=False) as run:
        assert run.codes() == [1] * PROCESSES, run.output()
    assert run.output().count("is not the same folder for all processes: process 1") > 1
    assert "Give a folder that all hosts mount (--out)" in run.output()
    assert not (folder / "metrics.jsonl").exists()
    assert not (folder / "checkpoints").exists()
