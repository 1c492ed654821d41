"""Who leads, who may follow it, and who can read the supervisors' secret?"""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpar.launch.leader import (
    Leader,
    Succession,
    is_led_elsewhere,
    make_secret,
    read_leader,
    read_secret,
)
from jaxpar.launch.lease import Holder
from jaxpar.launch.rendezvous import Attempt

LEADER = Leader(3, 0, "a", "127.0.0.1", 99)
ATTEMPT = Attempt(4, "run", None, {0: "a", 2: "b", 5: "c"}, {0: 1, 2: 1, 5: 1}, 3)
HOLDER = Holder("host", "another place", 12, 34, "2026-01-01", "user", 5)


def write(path: Path, record: Leader | Holder) -> None:
    path.write_text(json.dumps(dataclasses.asdict(record)))


def test_leader_of_another_host_is_known_by_the_lease(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    assert read_leader(folder) is None
    assert not is_led_elsewhere(folder, 1)
    write(folder / "leader.json", LEADER)
    write(tmp_path / "lease.3", HOLDER)
    assert read_leader(folder) == LEADER
    assert is_led_elsewhere(folder, 1)
    assert not is_led_elsewhere(folder, 0), "its own host's"
    write(tmp_path / "lease.4", HOLDER)
    assert not is_led_elsewhere(folder, 1), "by nobody who has named itself"


def test_secret_is_of_this_user_alone(tmp_path: Path) -> None:
    assert read_secret(tmp_path) is None
    made = make_secret(tmp_path)
    assert len(made) == 32
    assert read_secret(tmp_path) == made != make_secret(tmp_path)
    path = tmp_path / "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    assert read_secret(tmp_path) is None
    for content in (b"", b"ab", b"\xff" * 64, b"zz" * 32):
        path.write_bytes(content)
        path.chmod(0o600)
        assert read_secret(tmp_path) is None


class Watched:
    """A succession, and the time by its clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.now, self.folder = 1000.0, folder
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.succession = Succession(folder, 60.0)

    def after(self, seconds: float, holder: Holder | None = None) -> list[int]:
        """The hosts whose turn it is."""
        self.now += seconds
        if holder is not None:
            write(self.folder / "lease.3", holder)
        self.succession.watch(LEADER)
        return [h for h in range(7) if self.succession.is_due(ATTEMPT, h)]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_lowest_host_follows_first_once_the_lease_is_silent(watched: Watched) -> None:
    assert watched.after(0, HOLDER) == []
    assert watched.after(59) == []
    grown = dataclasses.replace(HOLDER, count=6)
    assert watched.after(0.5, grown) == [], "it has grown"
    assert watched.after(59.9) == []
    assert watched.after(0.2) == [2]
    assert watched.after(3.0) == [2, 5]
    # Those without a part in the last attempt come after all others.
    assert watched.after(3.0) == [0, 2, 5]
    assert watched.after(3.0) == [0, 1, 2, 5]
    watched.succession.forget()
    assert not watched.succession.is_due(ATTEMPT, 2)


def test_lease_that_was_given_back_is_free_at_once(watched: Watched) -> None:
    assert watched.after(0, dataclasses.replace(HOLDER, is_over=True)) == [2]
    assert watched.succession.holder is not None


def test_unreadable_lease_is_nobodys_turn(watched: Watched) -> None:
    assert watched.after(100) == []
    (watched.folder / "lease.3").write_text("{")
    assert watched.after(100) == []
    assert watched.after(100, HOLDER) == []
