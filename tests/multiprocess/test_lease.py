"""Is a run that is started twice trained by one of the two, whatever happens?"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jaxpar.launch.exit_codes import REPLACED
from jaxpar.launch.lease import newest_lease
from tests.multiprocess.launching import (
    LIMIT_SECONDS,
    ROOT,
    SCRIPT,
    Launched,
    command,
    environment,
    run_to_the_end,
)
from tests.multiprocess.test_launch import assert_same_end
from tests.runs import events

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run_to_the_end(out, processes=2)
    return out


def contents(out: Path, without: str) -> dict[str, bytes]:
    """Every file of a run but those under a folder."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and (out / without) not in path.parents
    }


def test_stopped_run_is_taken_over_and_writes_nothing_more(
    whole: Path, tmp_path: Path
) -> None:
    """A host that froze, whose run another one has ended, and that wakes up again."""
    out = tmp_path / "run"
    args = command(out, "--pause=0.5", of_launch=("--processes=2",))
    with Launched(out, args) as frozen, contextlib.ExitStack() as awake:
        frozen.wait_for_save(4)
        parts = [psutil.Process(frozen.process.pid)]
        parts += parts[0].children(recursive=True)
        for part in parts:
            part.send_signal(signal.SIGSTOP)
            awake.callback(lambda pid: os.kill(pid, signal.SIGCONT), part.pid)
        taken = command(out, "--pause=0.5", of_launch=("--processes=2",))
        taken.insert(taken.index("launch") + 2, "--limits.lost=3")
        with Launched(out, taken) as other:
            assert other.code() == 0, other.output()
        assert "if nothing is heard of it for 3 s" in other.output()
        assert newest_lease(out) == 2
        before = contents(out, "launch/0001")
        awake.close()
        assert frozen.code() == REPLACED, frozen.output()
        psutil.wait_procs(parts, timeout=30)
        assert contents(out, "launch/0001") == before
    assert_same_end(out, whole)


def test_run_that_is_going_on_is_not_started_twice(tmp_path: Path) -> None:
    """Without a launcher: a script in two terminals."""
    out = tmp_path / "run"
    start = [sys.executable, str(SCRIPT), f"--out={out}", "--pause=0.5"]
    options = {"cwd": ROOT, "env": environment(), "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(start, **options) as first:
        while not (out / "metrics.jsonl").exists():
            assert first.poll() is None, first.stderr.read()
        second = subprocess.run(
            start,
            check=False,
            timeout=LIMIT_SECONDS,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        said = first.communicate(timeout=LIMIT_SECONDS)
    assert first.returncode == 0, said
    assert second.returncode == 1
    assert f"process {first.pid} of " in second.stderr
    assert "another process runs the run" in second.stderr
    assert "make room" not in second.stderr + said[1]
    assert not (out / "events.jsonl").exists() or not events(out, "save failed")
