"""Is the end of an attempt judged by codes, phases, and the other hosts?"""

import signal
import time
from pathlib import Path

import pytest

from jaxpar.launch import watchdog
from jaxpar.launch.board import Board
from jaxpar.launch.exit_codes import CORRUPT, DIVERGED, SAVE_FAILED, STOPPED
from jaxpar.launch.group import Group
from jaxpar.launch.heartbeat import Beat
from jaxpar.launch.leader import Leader
from jaxpar.launch.limits import Limits
from jaxpar.launch.rendezvous import Attempt, Outcome
from jaxpar.launch.start import Launch, workers_of
from jaxpar.launch.watchdog import Watchdog
from jaxpar.launch.worker_environment import say_error


class FakeGroup(Group):
    """Two workers whose codes and phases are given."""

    def __init__(self, launch: Launch, attempt: Attempt):
        self.workers = workers_of(launch, attempt)
        self.given: list[int | None] = [None, None]
        self.phases = ["step", "step"]
        self.since = time.monotonic()
        self.halted: set[int] = set()
        self.sent: list[int] = []
        self.dumped = self.ended = 0

    def codes(self) -> list[int | None]:
        return self.given

    def beats(self) -> list[Beat]:
        return [Beat(phase, 3, 0, self.since) for phase in self.phases]

    def stopped(self) -> set[int]:
        return self.halted

    def send(self, number: int) -> None:
        self.sent.append(number)

    def dump_stacks(self) -> None:
        self.dumped += 1

    def end(self) -> None:
        self.ended += 1


class Watched:
    """A watchdog of host 0, its group, and the board of host 1."""

    def __init__(self, folder: Path):
        self.here, self.there = (
            Board(folder / "launch", host, 2, "127.0.0.1", lost=0.0)
            for host in range(2)
        )
        members = {0: self.here.me.id, 1: self.there.me.id}
        self.attempt = Attempt(1, "run", "x:1", members, {0: 2, 1: 2}, 4)
        self.here.announce(self.attempt)
        for board in (self.here, self.there):
            board.publish(attempt=1, running=True)
        launch = Launch(("train.py",), folder, processes=2)
        self.group = FakeGroup(launch, self.attempt)
        Path(self.group.workers[0].files).mkdir()
        self.asked: int | None = None
        self.name = self.here.me.hostname

    def end(self, **limits: float) -> tuple:
        args = self.group, self.here, self.attempt, Limits(**limits)
        found = Watchdog(*args, lambda: self.asked).to_the_end()
        assert self.group.ended == 1
        return found


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.01)
    return Watched(tmp_path)


@pytest.mark.parametrize(
    ("codes", "kind", "code", "why"),
    [
        ([0, 0], "done", 0, "all workers have ended well"),
        ([1, None], "failed", 1, "worker 0 (HOST) ended with code 1"),
        ([None, -9], "failed", 1, "worker 1 (HOST) was killed by SIGKILL"),
        # Those that abort because another was killed are not the cause.
        ([1, -9], "failed", 1, "worker 1 (HOST) was killed by SIGKILL"),
        ([-6, 1], "failed", 1, "worker 0 (HOST) was killed by SIGABRT"),
        ([1, DIVERGED], "refused", DIVERGED, "worker 1 (HOST) ended with code 65"),
        ([STOPPED, STOPPED], "saved", STOPPED, "worker 0 (HOST) was asked to end"),
        ([STOPPED, 1], "failed", 1, "worker 1 (HOST) ended with code 1"),
        ([0, SAVE_FAILED], "failed", 1, "worker 1 (HOST) ended with code 74"),
    ],
)
def test_exit_codes_decide(
    watched: Watched, codes: list, kind: str, code: int, why: str
) -> None:
    watched.group.given = codes
    found = watched.end(save=0.01)
    assert found == (kind, code, why.replace("HOST", watched.name))


def test_workers_own_error_is_the_reason(watched: Watched) -> None:
    say_error(watched.group.workers[1], "ValueError: no")
    watched.group.given = [None, CORRUPT]
    assert watched.end() == ("refused", CORRUPT, "ValueError: no")


@pytest.mark.parametrize("codes", [[STOPPED, STOPPED], [STOPPED, -signal.SIGTERM]])
def test_signal_to_the_launcher_is_passed_on_once(
    watched: Watched, codes: list
) -> None:
    watched.asked, watched.group.given = signal.SIGUSR1, codes
    found = watched.end()
    assert found == ("stopped", STOPPED, "SIGUSR1 received: restart to resume")
    assert watched.group.sent == [signal.SIGTERM]


def test_worker_beyond_its_limit_is_named_with_its_stacks(watched: Watched) -> None:
    watched.group.since -= 100
    watched.group.phases = ["save", "step"]
    kind, _, why = watched.end(step=50.0)
    assert (kind, watched.group.dumped) == ("stalled", 1)
    assert why.startswith(f"worker 1 ({watched.name}) was at step, step 3 for 100.")


def test_stopped_worker_is_named_before_those_that_wait_for_it(
    watched: Watched,
) -> None:
    watched.group.since -= 100
    watched.group.halted = {1}
    _, _, why = watched.end(step=50.0)
    assert why.startswith(f"worker 1 ({watched.name}) was at step")
    assert why.endswith("above the limit of 50 s (the process was stopped)")


def test_stopped_worker_is_named_though_the_one_that_waits_is_late_first(
    watched: Watched,
) -> None:
    watched.group.since -= 100
    watched.group.phases = ["step", "save"]
    watched.group.halted = {1}
    kind, _, why = watched.end(step=50.0)
    assert (kind, watched.group.dumped) == ("stalled", 1)
    one, other = (f"worker {index} ({watched.name})" for index in range(2))
    assert why.startswith(f"{other} was stopped by a signal: {one} was at step, step 3")
    assert why.endswith("above the limit of 50 s")


def test_workers_that_do_not_end_after_a_signal_are_ended(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_SAVING_SECONDS", 0.02)
    watched.asked = signal.SIGTERM
    kind, _, why = watched.end()
    assert kind == "stalled"
    assert why == f"worker 0 ({watched.name}) did not save and end within 0.02 s"


def test_attempt_that_the_head_has_ended_ends_here(watched: Watched) -> None:
    ended = Attempt(**{**vars(watched.attempt), "state": "ended", "why": "host 0 fell"})
    watched.here.announce(ended)
    assert watched.end() == ("ended", 0, "host 0 fell")
    assert watched.group.dumped == 1


def test_failure_of_another_host_ends_the_attempt_and_its_success_does_not(
    watched: Watched,
) -> None:
    watched.there.publish(running=False, outcome=Outcome("done", 0, "", []))
    watched.group.given = [0, None]
    watchdog_of = Watchdog(
        watched.group, watched.here, watched.attempt, Limits(), lambda: None
    )
    assert watchdog_of._end_elsewhere() is None
    watched.there.publish(outcome=Outcome("failed", 1, "x", []))
    assert watched.end() == ("ended", 0, "host 1 ended the attempt")


def test_new_supervisor_of_another_host_ends_the_attempt(watched: Watched) -> None:
    Board(watched.there.folder, 1, 2, "127.0.0.1", lost=0.0).publish(
        attempt=1, running=True
    )
    assert watched.end() == ("ended", 0, "host 1 ended the attempt")


def test_leader_ends_the_attempt_for_all_at_once(watched: Watched) -> None:
    """Before it ends its own workers, which takes seconds."""
    seen = []
    watched.group.end = lambda: seen.append(watched.there.attempt())
    watched.there.publish(outcome=Outcome("failed", 1, "x", []))
    Watchdog(
        watched.group, watched.here, watched.attempt, Limits(), lambda: None
    ).to_the_end()
    assert (seen[0].state, seen[0].why) == ("ended", "host 1 ended the attempt")


class Following(Watched):
    """A watchdog of a host that another one leads, and what is heard of that."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        super().__init__(folder)
        self.silence = 0.0
        self.attempt = Attempt(**{**vars(self.attempt), "head": 1, "lease": 3})
        self.here.announce(self.attempt)
        monkeypatch.setattr(self.here, "silence_of_leader", lambda: self.silence)


def test_lost_leader_is_a_failure_of_its_hosts(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hear nobody else, so no other host's end is theirs to see."""
    following = Following(tmp_path / "another", monkeypatch)
    watchdog_of = Watchdog(
        following.group, following.here, following.attempt, Limits(), lambda: None
    )
    following.silence = 59.0
    assert watchdog_of._end_elsewhere() is None
    following.silence = 61.0
    why = f"the supervisor of host 1 ({following.name}) is silent"
    assert following.end() == ("failed", 1, why)


def test_new_leader_ends_the_attempt_of_the_old_one(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Following(tmp_path / "another", monkeypatch)
    following.here.leader = Leader(4, 0, "x", "127.0.0.1", 9)
    assert following.end() == ("ended", 0, "host 0 leads now")


def test_silent_host_is_a_failure_here(watched: Watched) -> None:
    kind, code, why = watched.end(lost=0.05)
    assert (kind, code) == ("failed", 1)
    assert why == f"the supervisor of host 1 ({watched.name}) is silent"
