"""Do Slurm and MPI, the real ones, start, requeue and end runs?

Where one is missing the tests say so; on the main lane of CI that is a failure.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxpar.launch.exit_codes import STOPPED
from tests.multiprocess.launching import (
    ROOT,
    SCRIPT,
    Launched,
    environment,
    missing,
    run_to_the_end,
)
from tests.multiprocess.test_launch import assert_same_end
from tests.runs import events, losses

CONFIG = ROOT / "tests/multiprocess/slurm.conf"
LIMIT_SECONDS = 240

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def jaxpar(*words: str) -> list[str]:
    return [sys.executable, "-m", "jaxpar", *words]


@pytest.fixture(scope="session")
def slurm() -> Iterator[None]:
    """A controller, a node and their authentication, on this machine."""
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        missing("no slurm-wlm and munge, or not root")
    is_ours = not _answers()
    if is_ours:
        for folder in (
            "/run/munge",
            "/var/log/slurm",
            "/var/lib/slurm/ctld",
            "/etc/slurm",
        ):
            Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.chown("/run/munge", "munge")
        shutil.copy(CONFIG, "/etc/slurm/slurm.conf")
        for start in (
            ["runuser", "-u", "munge", "--", "munged"],
            ["slurmctld"],
            ["slurmd", "-N", "localhost"],
        ):
            subprocess.run(start, check=False, capture_output=True)
    until = time.monotonic() + 30
    while not _answers():
        if time.monotonic() > until:
            missing("slurmctld does not answer")
        time.sleep(0.5)
    yield
    subprocess.run(["scancel", "--user=root"], check=False)
    if is_ours:
        subprocess.run(["scontrol", "shutdown"], check=False)
        os.kill(int(Path("/run/munge/munged.pid").read_text()), signal.SIGTERM)


def _answers() -> bool:
    said = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        said.returncode == 0 and re.search("idle|mixed|alloc", said.stdout) is not None
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run_to_the_end(out, "--pause=0.3", processes=2)
    return out


@pytest.mark.usefixtures("slurm")
def test_two_tasks_of_srun_are_one_run(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launch = jaxpar("launch", "slurm", f"--out={out}", str(SCRIPT), "--", "--pause=0.3")
    with Launched(out, ["srun", "-n", "2", *launch]) as run:
        assert run.code() == 0, run.output()
    assert_same_end(out, whole)


def shown(job: str) -> str:
    said = subprocess.run(
        ["scontrol", "show", "job", job, "--oneliner"],
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout


def state_of(job: str) -> str:
    return re.search(r"JobState=(\w+)", shown(job))[1]


def wait_for(job: str, *states: str) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while state_of(job) not in states:
        assert time.monotonic() < until, f"job {job} is {state_of(job)}"
        time.sleep(0.5)


def wait_for_steps(out: Path, count: int) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while True:
        path = out / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= count:
            return
        assert time.monotonic() < until, logs(out)
        time.sleep(0.1)


def logs(out: Path) -> str:
    found = sorted((out / "launch").glob("slurm-*.log"))
    return "\n".join(f"-- {path.name}\n{path.read_text()[-3000:]}" for path in found)


def submit(out: Path, *flags: str, script: tuple[str, ...] = ()) -> str:
    """Have `jaxpar launch slurm` write a job's script, and submit it."""
    file = out.with_suffix(".sh")
    launch = ("launch", "slurm", f"--out={out}", "--processes=2", f"--sbatch={file}")
    subprocess.run(
        jaxpar(*launch, *script, str(SCRIPT), "--", *flags),
        check=True,
        cwd=ROOT,
        env=environment(),
    )
    said = subprocess.run(
        ["sbatch", str(file)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    return said.stdout.split()[-1]


@pytest.mark.usefixtures("slurm")
def test_requeued_job_goes_on_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    """In a folder of any name, with options of Slurm's own and a line of shell."""
    out, marker = tmp_path / "a run's #1 100%", tmp_path / "ran before"
    lines = (f"--batch.preamble=touch {shlex.quote(str(marker))}",)
    asks = ("--batch.option=comment=it's #1", "--batch.option", "nice=7", *lines)
    job = submit(out, "--pause=0.3", script=asks)
    said = shown(job)
    assert "Comment=it's #1" in said
    assert "Nice=7" in said
    assert "CPUs/Task=2" in said, "one for each worker"
    wait_for_steps(out, 5)
    assert marker.exists()
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait_for(job, "PENDING", "COMPLETING")
    # Slurm holds a requeued job back for two minutes unless told to go on.
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
    wait_for(job, "COMPLETED")
    (event,) = events(out, "stopped")
    assert (event["code"], event["step"] < 12) == (STOPPED, True)
    assert_same_end(out, whole)


@pytest.mark.usefixtures("slurm")
def test_warning_signal_saves_in_time_and_requeues(tmp_path: Path) -> None:
    """A limit of two minutes; the warning comes up to a minute early."""
    out = tmp_path / "run"
    asks = ("--batch.time=00:02:00", "--batch.warn-seconds=30")
    job = submit(out, "--pause=0.5", "--steps=1000", "--save-every=1000", script=asks)
    until = time.monotonic() + LIMIT_SECONDS
    while not ((out / "events.jsonl").exists() and events(out, "stopped")):
        assert time.monotonic() < until, logs(out)
        time.sleep(0.5)
    (event,) = events(out, "stopped")
    assert event["code"] == STOPPED
    saved = json.loads((out / "launch" / "attempt.json").read_text())
    assert saved["code"] in (0, STOPPED)
    wait_for(job, "PENDING", "RUNNING", "COMPLETING")
    subprocess.run(["scancel", job], check=True)
    assert sorted(losses(out)) == list(range(1, event["step"] + 1))
    steps = sorted((out / "checkpoints").glob("step_*"))
    assert steps[-1].name.endswith(f"{event['step']:08d}")


def test_mpiexec_starts_one_run(whole: Path, tmp_path: Path) -> None:
    if shutil.which("mpiexec", path=os.path.dirname(sys.executable)) is None:
        missing("no mpich in this environment")
    out = tmp_path / "run"
    args = jaxpar(
        "launch", "mpi", "--hosts=2", f"--out={out}", str(SCRIPT), "--", "--pause=0.3"
    )
    with Launched(out, args) as run:
        assert run.code() == 0, run.output()
    assert_same_end(out, whole)
    assert len(list((out / "launch").glob("host-*.json"))) == 2
