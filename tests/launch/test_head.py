"""Does the leader restart a run with the right hosts, and end it with a reason?"""

import dataclasses
from pathlib import Path

import pytest

from jaxpar.launch import head as heads
from jaxpar.launch.board import Board
from jaxpar.launch.exit_codes import GAVE_UP
from jaxpar.launch.head import RunHead
from jaxpar.launch.leader import read_left_out
from jaxpar.launch.limits import Limits
from jaxpar.launch.rendezvous import Attempt, Outcome, WorkerEnd
from jaxpar.launch.report import Report
from jaxpar.launch.start import Launch
from tests.launch.connections import opened

HOSTS = 4


class Led:
    """A leader of four hosts, whose attempts end as a test says."""

    def __init__(self, folder: Path, **options: int):
        limits = Limits(rendezvous=0.05)
        launch = Launch(("x.py",), folder, hosts=HOSTS, limits=limits, **options)
        self.launch = dataclasses.replace(launch, lease=1)
        self.boards = [
            opened(Board(folder / "launch", host, 1, "127.0.0.1", lost=0.0))
            for host in range(HOSTS)
        ]
        self.report = Report(folder, 0)
        self.number, self.resumed = 0, 0
        self.head = self.made()

    def made(self, left_out: frozenset[int] = frozenset()) -> RunHead:
        own = self.boards[0]
        args = self.launch, own, self.report, lambda: None, own.publish
        return RunHead(*args, left_out)

    def attempt(self) -> Attempt:
        self.number += 1
        for _ in range(2):  # Alive: they are heard twice.
            for board in self.boards:
                board.publish()
                self.boards[0].member(board.me.host)
                if board is not self.boards[0]:
                    self.head._is_alive(board.me)
        return self.head.announce(self.number)

    def fails(self, host: int) -> Attempt:
        """Have a worker of a host be killed; what is announced then."""
        attempt = self.attempt()
        assert attempt.state == "run", attempt.why
        for board in self.boards:
            code = -9 if board.me.host == host else None
            kind = "failed" if code else "ended"
            end = WorkerEnd(0, code, "step", self.resumed, 9, None, [], [])
            outcome = Outcome(kind, 1, f"{kind} {board.me.host}", [end])
            board.publish(attempt=self.number, running=False, outcome=outcome)
        self.head.decide(attempt)
        return self.boards[0].attempt()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(done, _seconds, _meanwhile):
        return done()

    monkeypatch.setattr(heads, "wait_until", at_once)


def said(led: Led) -> str:
    return led.report.path.read_text()


def test_host_that_fails_three_times_is_left_out(tmp_path: Path) -> None:
    led = Led(tmp_path, least_hosts=3)
    assert [led.fails(2).state for _ in range(2)] == ["ended"] * 2
    assert set(led.attempt().members) == {0, 1, 2, 3}
    assert led.fails(2).state == "ended"
    assert "host 2 failed 3 times and is left out" in said(led)
    assert "the run goes on with 3 hosts" in said(led)
    again = led.attempt()
    assert (again.state, set(again.members)) == ("run", {0, 1, 3})
    # A later leader knows it.
    assert read_left_out(led.boards[0].folder) == {2}
    assert set(led.made(frozenset({2})).announce(9).members) == {0, 1, 3}


def test_run_ends_where_too_few_hosts_would_be_left(tmp_path: Path) -> None:
    led = Led(tmp_path, least_hosts=4)
    over = [led.fails(2) for _ in range(3)][-1]
    assert (over.state, over.code) == ("over", GAVE_UP)
    assert over.why == (
        "failed 2; host 2 failed 3 times, and 3 of 4 hosts remain without it, fewer "
        "than --least-hosts 4: replace it, and start again"
    )


def test_no_host_is_left_out_unasked(tmp_path: Path) -> None:
    led = Led(tmp_path)
    assert [led.fails(2).state for _ in range(4)] == ["ended"] * 4
    assert set(led.attempt().members) == {0, 1, 2, 3}
    assert "--least-hosts lets a run go on without it" in said(led)
    assert "is left out" not in said(led)


def test_run_out_of_restarts_ends_and_one_that_saves_goes_on(tmp_path: Path) -> None:
    led = Led(tmp_path, restarts=2)
    for step in range(5):
        led.resumed = step
        assert led.fails(step % 4).state == "ended"
    over = led.fails(1)
    assert (over.state, over.code) == ("ended", 0)
    over = led.fails(2)
    assert (over.state, over.code) == ("over", GAVE_UP)
    assert over.why == "failed 2; all 2 restarts of this hour are used"


def test_texts_of_outcomes_are_reported_though_they_are_not_sent(
    tmp_path: Path,
) -> None:
    led = Led(tmp_path)
    led.fails(3)
    assert "host 3: failed: failed 3" in said(led)
