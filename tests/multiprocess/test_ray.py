"""Are Ray's workers one job, that trains as one process does and stays at it?

A real local cluster of Ray for each launch, which takes its time to start.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxpar.exit_codes import GAVE_UP, REFUSED, STOPPED
from jaxpar.launch.heartbeat import Beat, read_heartbeat
from jaxpar.launch.ray_plan import attempt_folder, attempts
from jaxpar.launch.security import is_loopback
from jaxpar.launch.supervisor import free_port
from jaxpar.launch.worker_environment import VARIABLE
from jaxpar.training.goodput import read_account
from tests.multiprocess.launching import (
    LIMIT_SECONDS,
    Launched,
    environment,
    final_files,
    missing,
)
from tests.multiprocess.test_training import ROOT
from tests.runs import events, losses

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray"),
]

# Of Ray's, some wait a minute for the others when the launcher is killed.
AGENTS_SECONDS = 120
SCRIPT = ROOT / "tests/multiprocess/ray_script.py"
FLAGS = ("--dropout=0", "--steps=12", "--save-every=4")
START = """
import json, sys
from pathlib import Path
from jaxpar.launch.ray_trainer import Ray, launch_ray
given = json.loads(sys.argv[1])
paths = {name: Path(given.pop(name)) for name in ("script", "out")}
raise SystemExit(launch_ray(Ray(**paths, flags=tuple(given.pop("flags")), **given)))
"""
# Workers that are told of no coordinator are what Ray's own joining leaves on a CPU.
SEPARATE = """
from jaxpar.launch import ray_cluster
import_ray = ray_cluster.import_ray
def import_and_separate():
    ray = import_ray()
    from jaxpar.launch import ray_worker
    ray.cloudpickle.register_pickle_by_value(ray_worker)
    announce = ray_worker._announce
    ray_worker._announce = lambda *given: (announce(*given)[0], None, 2)
    return ray
ray_cluster.import_ray = import_and_separate
"""


@pytest.fixture(scope="session")
def ray() -> None:
    if importlib.util.find_spec("ray") is None:
        missing("needs Ray Train: pip install jaxpar[ray]")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster of Ray that runs, and who asks for its token."""

    address: str
    process: psutil.Process


class ByRay(Launched):
    """A launch by Ray that runs, and leaves no process behind."""

    def __init__(
        self,
        out: Path,
        *flags: str,
        cluster: Cluster | None = None,
        program: str = START,
        **given: Any,
    ):
        spec = {"script": str(SCRIPT), "out": str(out), "flags": flags, "processes": 2}
        if cluster is not None:
            given["address"] = cluster.address
        super().__init__(out, [sys.executable, "-c", program, json.dumps(spec | given)])
        self._started: set[psutil.Process] = set()
        self._cluster = cluster

    def __exit__(self, *error: object) -> None:
        self.all_processes()
        super().__exit__()
        _, alive = psutil.wait_procs(self._started, timeout=AGENTS_SECONDS)
        left = [each for each in alive if is_running(each)]
        for each in left:
            each.kill()
        assert error[0] or left == []

    def all_processes(self) -> list[psutil.Process]:
        """Those that the launcher has started, and theirs."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._started |= set(found)
        return found

    def attempt(self) -> int:
        return max(attempts(self.out), default=0)

    def beat(self, worker: int = 0) -> Beat | None:
        folder = attempt_folder(self.out, self.attempt())
        return read_heartbeat(folder / f"worker-{worker:04d}.heartbeat")

    def workers(self) -> list[psutil.Process]:
        among = self.all_processes()
        if self._cluster is not None:
            among = self._cluster.process.children(recursive=True)
        found = {}
        for each in among:
            with contextlib.suppress(psutil.Error, KeyError):
                if "jaxpar.launch.worker" in each.cmdline():
                    found[json.loads(each.environ()[VARIABLE])["index"]] = each
        return [found[index] for index in sorted(found)]


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(process: psutil.Process) -> Iterator[str]:
    try:
        for each in process.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                yield each.laddr.ip.removeprefix("::ffff:")
    except psutil.NoSuchProcess:
        return


def end_of(out: Path, *flags: str, **given: Any) -> tuple[int, str]:
    """Launch and wait: the code, and what was said."""
    with ByRay(out, *flags, **given) as run:
        return run.code(), run.told()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Started by a user, with a token: it takes its time to start."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        port = free_port("127.0.0.1")
        start = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
        more = ["--include-dashboard=false", f"--temp-dir={folder}/ray"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("ray"), *start, *more],
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        at_end.callback(process.wait, timeout=60)
        at_end.callback(process.terminate)
        limit = time.monotonic() + LIMIT_SECONDS
        while "Ray runtime started" not in (folder / "log").read_text():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < limit
            time.sleep(0.1)
        yield Cluster(f"127.0.0.1:{port}", psutil.Process(process.pid))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, without any launcher."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *FLAGS],
        cwd=ROOT,
        env=environment(),
        check=True,
        timeout=LIMIT_SECONDS,
    )
    return out


def seen(out: Path, processes: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"seen-{i}.json").read_text()) for i in range(processes)]


def assert_whole(out: Path, alone: Path) -> None:
    assert losses(out) == pytest.approx(losses(alone), rel=1e-6)
    assert final_files(out, 12).keys() == final_files(alone, 12).keys()
    one, two = seen(out, 2)
    (whole,) = seen(alone, 1)
    assert [one["processes"], two["processes"], whole["processes"]] == [2, 2, 1]
    assert one["devices"] == two["devices"] == whole["devices"]
    assert one["rows"] != two["rows"]
    assert one["rows"] + two["rows"] == whole["rows"]


def test_two_workers_are_one_job_that_only_this_host_reaches(
    alone: Path, tmp_path: Path
) -> None:
    """The token is in one private file, and on no command line."""
    out = tmp_path / "two"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_step(2)
        processes = [psutil.Process(run.process.pid), *run.all_processes()]
        heard = {ip for each in processes for ip in listening(each)}
        assert heard
        assert all(map(is_loopback, heard)), heard
        (path,) = {
            Path(each.environ()["RAY_AUTH_TOKEN_PATH"]) for each in run.workers()
        }
        token = path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        for each in filter(is_running, processes):
            assert token not in " ".join(each.cmdline())
        assert run.code() == 0, run.told()
        assert token not in run.told() + run.report()
    assert not path.parent.exists()
    assert_whole(out, alone)
    assert [each.name for each in (out / "launch").glob("ray-*")] == ["ray-0001"]


@pytest.mark.parametrize("which", ["worker", "Ray's"])
def test_killed_worker_has_all_start_again(
    which: str, alone: Path, tmp_path: Path
) -> None:
    """Its own process, or the one of Ray's that started it."""
    out = tmp_path / "killed"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_step(6)
        victim = run.workers()[1]
        (victim if which == "worker" else victim.parent()).kill()
        run.until(lambda: run.attempt() == 2, "a second attempt")
        run.until(lambda: len(run.workers()) == 2, "two workers")
        assert run.code() == 0, run.told()
        report = run.report()
    found = " .* was killed by SIGKILL" if which == "worker" else ": Ray's process end"
    assert re.search(f"worker 1{found}.*: Ray has started all again", report), report
    assert_whole(out, alone)
    assert [each["resumed"] for each in read_account(out)] == [0, 4]


def test_run_is_given_up_when_the_restarts_are_used(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "given-up"
    with ByRay(out, *FLAGS, "--pause=0.3", restarts=0, cluster=cluster) as run:
        run.wait_for_step(2)
        run.kill_a_worker(0)
        assert run.code() == GAVE_UP, run.told()
    assert "was killed by SIGKILL; 0 restarts are used" in run.told()


def test_what_starting_again_would_not_mend_is_not_tried_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "refused"
    code, told = end_of(out, *FLAGS, "--mesh.data=3", cluster=cluster)
    assert code == REFUSED, told
    assert "launch: ValueError: mesh: 3 devices can't be divided among 2" in told
    assert attempts(out) == [1]


def test_workers_that_would_be_separate_jobs_are_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "separate"
    code, told = end_of(out, *FLAGS, program=SEPARATE + START, cluster=cluster)
    assert code == REFUSED, told
    assert "of 2 and has no coordinator: each would train the whole run" in told
    assert attempts(out) == [1]
    assert not (out / "run.json").exists()


def test_signal_saves_and_ends_and_the_run_goes_on(
    alone: Path, cluster: Cluster, tmp_path: Path
) -> None:
    """To all of the terminal's processes, as an interrupt is; then on a cluster."""
    out = tmp_path / "signal"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_step(6)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.code() == STOPPED, run.told()
    (event,) = events(out, "stopped")
    assert 6 <= event["step"] < 12
    code, told = end_of(out, *FLAGS, "--pause=0.3", cluster=cluster)
    assert code == 0, told
    assert_whole(out, alone)
    assert attempts(out) == [1, 2]
    assert read_account(out)[1]["resumed"] == event["step"]


def test_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_step(2)
        run.all_processes()
        run.process.kill()


def test_hosts_are_checked_before_a_worker_starts(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # Ray's own, at its import.
        from jaxpar.launch import ray_trainer, ray_worker  # noqa: PLC0415
    from jaxpar.launch.rendezvous import Board  # noqa: PLC0415

    script = tmp_path / "script.py"
    script.touch()
    plan = ray_trainer.make_plan(ray_trainer.Ray(script, out=tmp_path / "out"))
    attempt = ray_worker._attempt(1, "127.0.0.1:1234", 2, 2)
    near, far = (Board(tmp_path, 1, 1, ip) for ip in ("127.0.0.1", "10.0.0.5"))
    assert ray_worker._contract(plan, near, attempt).index == 1
    with pytest.raises(ValueError, match=r"--address 10.0.0.5: others can reach it"):
        ray_worker._contract(plan, far, attempt)
    script.unlink()
    with pytest.raises(FileNotFoundError, match="every host of the cluster must see"):
        ray_worker._contract(plan, near, attempt)
