"""Does a run on Ray train as one process does, and survive what Ray survives?

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxpar.launch.board import Board
from jaxpar.launch.exit_codes import GAVE_UP, REFUSED, STOPPED
from jaxpar.launch.lease import take_lease
from jaxpar.launch.security import is_loopback
from jaxpar.launch.supervisor import only_one
from jaxpar.launch.worker_environment import VARIABLE
from jaxpar.training.goodput import read_account
from tests.multiprocess.launching import (
    LIMIT_SECONDS,
    ROOT,
    Launched,
    environment,
    final_files,
    missing,
)
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
# `ray start` has a second node only on an address that others reach.
NODES = """
import os, sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2, "object_store_memory": 100 * 1024**2}
head = {**node, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**node)
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(cluster.address)
os.rename(file.name, sys.argv[1])
sys.stdin.read()
cluster.shutdown()
"""
TWO_HOSTS: Any = {"hosts": 2, "processes": 1, "insecure": True}


@pytest.fixture(scope="session")
def ray() -> None:
    if importlib.util.find_spec("ray") is None:
        missing("needs Ray: pip install 'jaxpar[ray]'")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster of Ray that runs, and who asks for its token."""

    address: str
    process: psutil.Process


class ByRay(Launched):
    """A launch by Ray that runs, and leaves no process behind."""

    def __init__(
        self, out: Path, *flags: str, cluster: Cluster | None = None, **given: Any
    ):
        given = {"processes": 2} | given
        if cluster is not None:
            given["cluster"] = cluster.address
        options = [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in given.items()
        ]
        own = ["launch", "ray", f"--out={out}", *options, str(SCRIPT)]
        super().__init__(out, [sys.executable, "-m", "jaxpar", *own, "--", *flags])
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of this machine, with a token: they take their time to start."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", NODES, str(folder / "address")],
                env={**environment(), "RAY_TMPDIR": str(folder)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        at_end.callback(process.wait, timeout=60)
        assert process.stdin is not None
        at_end.callback(process.stdin.close)
        limit = time.monotonic() + LIMIT_SECONDS
        while not (folder / "address").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < limit, (folder / "log").read_text()
            time.sleep(0.1)
        yield Cluster((folder / "address").read_text(), psutil.Process(process.pid))


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
        assert run.code() == 0, run.output()
        assert token not in run.output() + run.report()
    assert not path.parent.exists()
    assert_whole(out, alone)
    assert not list((out / "launch").glob("ray-*"))


def test_killed_worker_has_all_start_again(alone: Path, tmp_path: Path) -> None:
    """By its supervisor, as on every host."""
    out = tmp_path / "killed"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_save(4)
        run.workers()[1].kill()
        run.until(lambda: run.attempt() == 2, "a second attempt")
        assert run.code() == 0, run.output()
        assert re.search(
            "worker 1 .* was killed by SIGKILL.*: restarting", run.output()
        )
    assert_whole(out, alone)
    assert [each["resumed"] for each in read_account(out)] == [0, 4]


def test_killed_process_of_ray_has_its_supervisor_start_again(
    alone: Path, tmp_path: Path
) -> None:
    """It takes its supervisor and the workers with it; Ray starts it again."""
    out = tmp_path / "lost"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_save(4)
        before = run.workers()
        supervisor = before[0].parent()
        assert supervisor is not None
        of_ray = supervisor.parent()
        assert of_ray is not None
        of_ray.kill()
        psutil.wait_procs([supervisor, *before], timeout=30)
        assert not any(map(is_running, [supervisor, *before]))
        run.until(lambda: run.attempt() == 2, "a second attempt")
        assert run.code() == 0, run.output()
    assert "Ray has started the supervisor of host 0 again" in run.report()
    assert_whole(out, alone)
    assert [each["resumed"] for each in read_account(out)] == [0, 4]


def test_two_hosts_are_one_job_and_start_again_when_one_is_lost(
    alone: Path, cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "hosts"
    with ByRay(out, *FLAGS, "--pause=0.3", cluster=cluster, **TWO_HOSTS) as run:
        run.wait_for_save(4)
        # Above a worker: its supervisor, Ray's process for the task, the node.
        assert len({each.parents()[2] for each in run.workers()}) == 2
        supervisor = run.workers()[1].parent()
        assert supervisor is not None
        supervisor.kill()
        run.until(lambda: run.attempt() == 2, "a second attempt")
        assert run.code() == 0, run.output()
    assert_whole(out, alone)
    assert [each["resumed"] for each in read_account(out)] == [0, 4]


def test_host_that_cannot_begin_ends_the_run_with_its_reason(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Such as one without the script, or the second one of the run."""
    out = tmp_path / "taken"
    with (
        only_one(Board(out / "launch", 1, 1, "")),
        ByRay(out, *FLAGS, cluster=cluster, **TWO_HOSTS) as run,
    ):
        assert run.code() == 2, run.output()
    assert "the supervisor of host 1 ended with code 2:" in run.output()
    assert "another launcher runs the run" in run.output()


def test_second_launcher_of_a_run_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "taken"
    lease = take_lease(out)
    with ByRay(out, *FLAGS, cluster=cluster) as run:
        assert run.code() == 2, run.output()
    lease.give_back()
    assert "another process runs the run" in run.output()


def test_run_is_given_up_when_the_restarts_are_used(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "given-up"
    with ByRay(out, *FLAGS, "--pause=0.3", restarts=0, cluster=cluster) as run:
        run.wait_for_step(2)
        run.workers()[0].kill()
        assert run.code() == GAVE_UP, run.output()
    assert "all 0 restarts of this hour are used" in run.output()


def test_what_starting_again_would_not_mend_is_not_tried_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "refused"
    with ByRay(out, *FLAGS, "--mesh.data=3", cluster=cluster) as run:
        code, attempts = run.code(), run.attempt()
    assert code == REFUSED, run.output()
    assert "ValueError: mesh: 3 devices can't be divided among 2" in run.output()
    assert attempts == 1


def test_signal_saves_and_ends_and_the_run_goes_on(
    alone: Path, cluster: Cluster, tmp_path: Path
) -> None:
    """To all of the terminal's processes, as an interrupt is; then on a cluster."""
    out = tmp_path / "signal"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_step(6)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.code() == STOPPED, run.output()
    (event,) = events(out, "stopped")
    assert 6 <= event["step"] < 12
    with ByRay(out, *FLAGS, "--pause=0.3", cluster=cluster) as run:
        assert run.code() == 0, run.output()
    assert_whole(out, alone)
    assert read_account(out)[1]["resumed"] == event["step"]


def test_hosts_that_the_cluster_does_not_have_are_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    options: Any = {"hosts": 3, "insecure": True, "limits.rendezvous": 2}
    with ByRay(tmp_path / "three", cluster=cluster, **options) as run:
        assert run.code() != 0
    assert "--hosts 3 --processes 2: Ray had no such hosts within 2 s" in run.output()


def test_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    with ByRay(out, *FLAGS, "--pause=0.3") as run:
        run.wait_for_step(2)
        run.all_processes()
        run.process.kill()
