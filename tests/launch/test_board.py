"""Do supervisors hear of each other, by connections and by files, alive and dead?"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxpar.launch.board import Board
from jaxpar.launch.rendezvous import Attempt, Outcome, WorkerEnd
from tests.launch.connections import opened
from tests.launch.test_rendezvous import ATTEMPT

LOST = 10.0
END = WorkerEnd(2, -9, "step, step 4", 0, 4, "ValueError: no", ["a", "b"], ["c"])
FAILED = Outcome("failed", 1, "worker 2 was killed", [END])


def files(folder: Path) -> list[Board]:
    """Two that go by files alone, at every call."""
    return [Board(folder, host, 2, "127.0.0.1", lost=0.0) for host in range(2)]


def test_members_read_each_other_whole(tmp_path: Path) -> None:
    first, second = files(tmp_path)
    second.publish(attempt=3, outcome=FAILED)
    assert first.member(1) == first.whole_member(1) == second.me
    assert first.member(1).outcome == FAILED
    assert first.member(0) is None


def test_attempts_are_read_as_announced(tmp_path: Path) -> None:
    first, second = files(tmp_path)
    assert second.attempt() is None
    first.announce(ATTEMPT)
    assert second.attempt() == ATTEMPT


def test_older_attempt_in_a_file_is_not_taken(tmp_path: Path) -> None:
    """Of a leader that was stopped between its check of the lease and its write."""
    first, second = files(tmp_path)
    for lease, number, state, is_taken in (
        (2, 4, "run", True),
        (2, 4, "ended", True),
        (2, 4, "run", False),
        (1, 9, "over", False),
        (2, 5, "run", True),
        (3, 5, "run", True),
    ):
        change = {"lease": lease, "number": number, "state": state}
        new = dataclasses.replace(ATTEMPT, **change)
        first.announce(new)
        assert (second.attempt() == new) == is_taken


def test_member_is_alive_while_its_count_changes(tmp_path: Path) -> None:
    """A file that was there before may be of a supervisor that is long gone."""
    first, second = files(tmp_path)
    second.publish()
    silent = first.silent_seconds(first.member(1), unseen=60.0)
    assert silent >= 60
    second.publish()
    assert first.silent_seconds(first.member(1), unseen=60.0) < 1
    replaced = dataclasses.replace(second.me, id="another", count=1)
    assert first.silent_seconds(replaced, unseen=60.0) >= 60


def test_plan_stays_that_of_the_first_launch(tmp_path: Path) -> None:
    first, second = files(tmp_path)
    assert first.planned(4) == 4
    assert second.planned(2) == 4


def test_folder_is_private(tmp_path: Path) -> None:
    Board(tmp_path / "launch", 0, 1, "127.0.0.1")
    assert (tmp_path / "launch").stat().st_mode & 0o777 == 0o700


class Hosts:
    """Boards of some hosts, the first of which leads, by a clock that tests set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int = 3):
        self.now, self.folder = 1000.0, folder / "launch"
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.boards = [self.board(host, number) for host in range(number)]
        self.head = self.boards[0]
        self.cut: set[int] = set()

    def board(self, host: int, hosts: int) -> Board:
        made = Board(self.folder, host, 1, "127.0.0.1", hosts=hosts, lost=LOST)
        return opened(made)

    def lead(self) -> Attempt:
        """Let the first lead, connect all, and announce an attempt of all."""
        self.head.lead(1)
        self.after(2.0)
        members = {board.me.host: board.me.id for board in self.boards}
        attempt = dataclasses.replace(ATTEMPT, members=members, lease=1)
        self.head.announce(attempt)
        self.after(0.1)
        return attempt

    def after(self, seconds: float, without: Sequence[Board] = ()) -> None:
        """Let time pass, with all at work but some."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1 if seconds < 1 else 0.25
            for _ in range(2):
                for board in self.boards:
                    if board not in without:
                        board.publish()
                        board.attempt()

    def silence(self, host: int) -> float:
        """Of a host, as the head hears it."""
        member = self.head.member(host)
        assert member is not None
        return self.head.silent_seconds(member, unseen=LOST)

    def counts(self) -> list[int]:
        paths = [self.folder / f"host-{b.me.host:04d}.json" for b in self.boards]
        return [json.loads(path.read_text())["count"] for path in paths]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path, monkeypatch)


def test_connected_hosts_need_no_file_to_be_alive(hosts: Hosts) -> None:
    attempt = hosts.lead()
    assert [board.attempt() for board in hosts.boards] == [attempt] * 3
    before = hosts.counts()
    messages = [board.messages for board in hosts.boards]
    hosts.after(4 * LOST)
    assert max(hosts.silence(1), hosts.silence(2)) <= LOST / 4 + 0.5
    assert max(b.silence_of_leader() for b in hosts.boards[1:]) <= LOST / 4 + 0.5
    assert hosts.counts()[1:] == before[1:], "no file was written"
    rates = [
        (board.messages - old) / (4 * LOST)
        for board, old in zip(hosts.boards, messages, strict=True)
    ]
    assert rates[1:] == pytest.approx([0.8, 0.8], abs=0.05), "4 each way in a limit"
    assert rates[0] == pytest.approx(1.6, abs=0.1)


def test_change_reaches_the_head_at_once_without_its_texts(hosts: Hosts) -> None:
    hosts.lead()
    hosts.boards[2].publish(attempt=3, running=False, outcome=FAILED)
    hosts.after(0.1)
    found = hosts.head.member(2)
    assert found.outcome.kind == "failed"
    assert found.outcome.workers[0].step == 4
    sent = json.dumps(dataclasses.asdict(found))
    assert "ValueError" not in sent
    assert "killed" not in sent
    assert hosts.head.whole_member(2).outcome == FAILED


def test_announcement_reaches_all_at_once(hosts: Hosts) -> None:
    attempt = hosts.lead()
    ended = dataclasses.replace(attempt, state="ended", why="worker 3 fell: secret")
    hosts.head.announce(ended)
    hosts.after(0.1)
    for board in hosts.boards[1:]:
        assert board.attempt() == dataclasses.replace(ended, why="")
    assert "secret" in (hosts.folder / "attempt.json").read_text()


def test_killed_host_is_silent_within_the_limit(hosts: Hosts) -> None:
    hosts.lead()
    hosts.after(3.7)
    hosts.boards[2].close()  # As a system does it for a process that it ends.
    hosts.after(LOST - 2.7, without=[hosts.boards[2]])
    assert hosts.silence(2) < LOST
    hosts.after(1.1 * LOST - (LOST - 2.7), without=[hosts.boards[2]])
    assert hosts.silence(2) > LOST
    assert hosts.silence(1) < LOST / 2


def test_stopped_host_is_silent_within_the_limit_and_the_head_too(
    hosts: Hosts,
) -> None:
    """Their connections stay."""
    hosts.lead()
    hosts.after(1.1 * LOST, without=[hosts.boards[2]])
    assert hosts.silence(2) > LOST
    hosts.after(0.1)
    assert hosts.silence(2) < 0.3, "and awake again"
    hosts.after(3.0)
    hosts.after(1.1 * LOST, without=[hosts.head])
    for board in hosts.boards[1:]:
        assert board.silence_of_leader() > LOST
    hosts.after(0.2)
    for board in hosts.boards[1:]:
        assert board.silence_of_leader() < 0.4


@pytest.mark.parametrize("is_told", [True, False])
def test_hosts_that_are_cut_off_go_by_files(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, is_told: bool, capsys
) -> None:
    """A network that fails, with or without a word, and a disk that does not."""
    attempt = hosts.lead()
    cut = hosts.boards[1]
    quiet = {"send": lambda *_: None, "poll": lambda *_: []}
    with monkeypatch.context() as patch:
        if is_told:
            cut._link.close()
            cut._link.error = "Connection refused"
        patch.setattr(cut._link, "connect", lambda *_: None)
        for name, call in quiet.items():
            patch.setattr(cut._link, name, call)
        worst = [0.0, 0.0]
        for _ in range(200):
            hosts.after(0.1)
            heard = hosts.silence(1), cut.silence_of_leader()
            worst = [max(pair) for pair in zip(worst, heard, strict=True)]
        assert max(worst) < LOST, worst
        again = dataclasses.replace(attempt, number=4)
        hosts.head.announce(again)
        hosts.after(LOST / 10 + 0.2)
        assert cut.attempt() == again
    said = capsys.readouterr().err
    assert ("can't connect to host 0 at 127.0.0.1:" in said) == is_told
    assert said.count("Open TCP between the hosts") == is_told
    hosts.after(3.0)
    before = hosts.counts()[1]
    hosts.after(LOST)
    assert hosts.counts()[1] == before, "connected again"


def test_host_that_speaks_for_another_or_nonsense_is_cut_off(hosts: Hosts) -> None:
    hosts.lead()
    own = hosts.boards[1]
    wrong = dataclasses.asdict(dataclasses.replace(own.me, host=2))
    for message in ({"member": wrong}, {"member": 1}, [1], {"member": {"host": 1}}):
        assert own._link.is_open
        own._link.send(message)
        hosts.head.publish()
        assert hosts.head.member(2).id == hosts.boards[2].me.id
        own._link.poll([])
        assert not own._link.is_open
        hosts.after(2.0)


def test_leader_that_sends_nonsense_is_not_believed(hosts: Hosts) -> None:
    attempt = hosts.lead()
    for message in ({"attempt": {"number": 1}}, [1], {"attempt": "x"}):
        hosts.head._store.send(1, message)
        hosts.boards[1].publish()
        assert not hosts.boards[1]._link.is_open
        assert hosts.boards[1].attempt() == attempt
        hosts.after(2.0)


def test_new_leader_is_followed_and_the_old_one_is_not(hosts: Hosts) -> None:
    attempt = hosts.lead()
    old, new, other = hosts.boards
    assert not other.may_lead()
    new.lead(2)
    again = dataclasses.replace(attempt, number=4, lease=2, head=1)
    new.announce(again)
    # The old one is stopped, and its connections stay.
    hosts.after(1.1 * LOST, without=[old])
    assert other.leader.host == 1
    assert other.attempt() == again
    assert other.silence_of_leader() < LOST / 2
    old.follow()
    hosts.after(LOST)
    assert old.attempt() == again
    assert new.silent_seconds(new.member(0)) < LOST / 2


def test_leader_of_long_ago_is_nobody_to_follow(hosts: Hosts, tmp_path: Path) -> None:
    """Its lease is free, and who has never heard it waits for host 0."""
    hosts.lead()
    hosts.head.close()
    late = Board(hosts.folder, 2, 1, "127.0.0.1", hosts=3, lost=LOST)
    record = {"hostname": "h", "place": "p", "pid": 1, "began": 1, "since": "s"}
    lease = json.dumps({**record, "user": "u", "count": 1, "is_over": True})
    (tmp_path / "lease.1").write_text(lease)
    hosts.boards[2] = opened(late)
    hosts.after(3 * LOST, without=[hosts.head])
    assert late.succession.is_due(None, 2)
    assert not late.may_lead()
    assert hosts.boards[1].may_lead()


def test_single_host_listens_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Hosts(tmp_path, monkeypatch, number=1)
    alone.head.lead(1)
    alone.after(5.0)
    assert alone.head._store is None
    assert sorted(path.name for path in alone.folder.iterdir()) == ["host-0000.json"]


def test_address_that_is_not_this_hosts_leaves_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    pair = Hosts(tmp_path, monkeypatch, number=2)
    pair.head.me = dataclasses.replace(pair.head.me, address="192.0.2.1")
    attempt = pair.lead()
    pair.after(3.0)
    assert pair.boards[1].attempt() == attempt
    assert "can't listen on 192.0.2.1" in capsys.readouterr().err
    assert pair.silence(1) >= LOST, "a file that may be left from long ago"
    pair.after(1.5)
    assert pair.silence(1) < LOST / 2
