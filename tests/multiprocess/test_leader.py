"""Does a run go on when the supervisor that leads is killed or stopped?

Two supervisors on one address, and a worker each.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jaxpar.launch.leader import read_leader
from tests.multiprocess.launching import Launched, command, run_to_the_end
from tests.runs import losses

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

FLAGS = ("--mesh.data=4", "--dropout=0", "--pause=0.5")
LAUNCH = ("--hosts=2", "--limits.lost=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    run_to_the_end(out, *FLAGS, processes=2)
    return out


class Hosts(contextlib.ExitStack):
    """The launchers of a run, one for each host."""

    def __init__(self, out: Path, *options: str):
        super().__init__()
        self.out, self.options = out, options
        self.launched = [self.start(host) for host in range(2)]

    def start(self, host: int) -> Launched:
        options = (*LAUNCH, *self.options, f"--host={host}")
        args = command(self.out, *FLAGS, of_launch=options)
        return self.enter_context(Launched(self.out, args))

    def leader(self) -> int:
        found = read_leader(self.out / "launch")
        return -1 if found is None else found.host


@contextlib.contextmanager
def stopped(launched: Launched) -> Iterator[None]:
    """A supervisor and its workers."""
    parts = [psutil.Process(launched.process.pid)]
    parts += parts[0].children(recursive=True)
    for part in parts:
        part.send_signal(signal.SIGSTOP)
    yield
    for part in parts:
        with contextlib.suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGCONT)


def test_run_goes_on_without_the_leader(whole: Path, tmp_path: Path) -> None:
    limits = ("--least-hosts=1", "--limits.rendezvous=8")
    with Hosts(tmp_path / "run", *limits) as hosts:
        first, second = hosts.launched
        first.wait_for_save(4)
        first.process.kill()
        assert second.code() == 0, second.output()
        assert hosts.leader() == 1
        assert "the supervisor of host 0 is lost: host 1 leads now" in second.output()
        assert "host 0: failed: its supervisor does not answer" in second.report()
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-5)


def test_leader_that_starts_again_follows(whole: Path, tmp_path: Path) -> None:
    with Hosts(tmp_path / "run") as hosts:
        first, second = hosts.launched
        first.wait_for_save(4)
        first.process.kill()
        second.until(lambda: hosts.leader() == 1, "another leader")
        again = hosts.start(0)
        codes = (again.code(), second.code())
        assert codes == (0, 0), second.output() + again.output()
        assert second.attempt() == 2
    assert losses(tmp_path / "run") == losses(whole)


def test_stopped_leader_follows_when_it_is_awake(whole: Path, tmp_path: Path) -> None:
    """Nobody runs an attempt twice: the old leader finds that it leads no more."""
    with Hosts(tmp_path / "run") as hosts:
        first, second = hosts.launched
        first.wait_for_save(4)
        with stopped(first):
            second.until(lambda: hosts.leader() == 1, "another leader")
        codes = (first.code(), second.code())
        assert codes == (0, 0), first.output() + second.output()
        assert second.attempt() == 2
    assert losses(tmp_path / "run") == losses(whole)


def test_host_that_fails_three_times_is_left_out(whole: Path, tmp_path: Path) -> None:
    """Its worker is killed once it is a step further; it ends with the run."""
    with Hosts(tmp_path / "run", "--least-hosts=1") as hosts:
        first, second = hosts.launched
        for number in (1, 2, 3):
            first.until(lambda n=number: first.attempt() == n, f"attempt {number}")
            first.until(first.has_gained, "a step")
            second.kill_a_worker(0)
        first.until(lambda: first.attempt() == 4, "attempt 4")
        assert (first.code(), second.code()) == (0, 0), first.output()
        assert "host 1 failed 3 times and is left out" in first.output()
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-5)
