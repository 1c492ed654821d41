"""Does one process at a time write into a run's folder, whatever becomes of the others?

Holders are real processes: they end, are killed, and are stopped and wake up again.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxpar.launch import lease as leases
from jaxpar.launch.lease import (
    Holder,
    LeaseHeldError,
    LeaseLostError,
    lease_of,
    newest_lease,
    read_holder,
    require_lease,
    take_lease,
    use_lease,
)

HOLD = """
import sys, time
from pathlib import Path
from jaxpar.launch.lease import LeaseHeldError, require_lease, take_lease
folder = Path(sys.argv[1])
try:
    lease = take_lease(folder, beat_seconds=0.05, stale_seconds=float(sys.argv[2]))
except LeaseHeldError as error:
    sys.exit(f"held: {error}")
print(lease.number, flush=True)
for _ in range(int(sys.argv[3])):
    time.sleep(0.05)
    require_lease(folder / "metrics.jsonl")
    with (folder / f"written.{lease.number}").open("a") as file:
        file.write("x")
"""


@contextmanager
def holder(folder: Path, stale: float = 1.0, turns: int = 10_000) -> Iterator:
    """Another process that takes the lease and writes under it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(stale), str(turns)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        process.number = int(process.stdout.readline() or 0)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def own_leases(monkeypatch) -> None:
    monkeypatch.setattr(leases, "_held", {})


def test_first_lease_has_number_1_and_says_who_holds_it(tmp_path):
    folder = tmp_path / "new"
    lease = take_lease(folder)
    found = read_holder(folder, 1)
    assert (lease.number, newest_lease(folder)) == (1, 1)
    assert (found.pid, found.is_over, found.is_dead()) == (os.getpid(), False, False)
    assert take_lease(folder) is lease, "a process may open its run again"
    assert lease_of(folder / "checkpoints" / "step_1") is lease
    assert lease_of(tmp_path) is None
    lease.require()
    lease.give_back()
    assert read_holder(folder, 1).is_over
    assert [path.name for path in folder.iterdir()] == ["lease.1"]


def test_living_holder_is_named_within_seconds(tmp_path):
    said = []
    with holder(tmp_path) as other:
        began = time.monotonic()
        with pytest.raises(LeaseHeldError) as raised:
            take_lease(tmp_path, stale_seconds=60.0, say=said.append)
    assert time.monotonic() - began < 10
    message = str(raised.value)
    assert f"process {other.pid} of " in message
    assert "since 20" in message
    assert "end it, or choose another folder (--out)" in message
    assert "if nothing is heard of it for 60 s" in said[0]


def test_lease_that_was_given_back_is_taken_at_once(tmp_path):
    with holder(tmp_path, turns=0) as other:
        assert other.wait(30) == 0
    assert take_lease(tmp_path, say=pytest.fail).number == 2


def test_dead_holder_on_this_host_is_replaced_at_once(tmp_path):
    with holder(tmp_path) as other:
        other.kill()
        other.wait()
        assert take_lease(tmp_path, say=pytest.fail).number == 2


def test_zombie_and_another_process_of_the_same_number_are_dead(tmp_path):
    with holder(tmp_path) as other:
        found = read_holder(tmp_path, 1)
        assert not found.is_dead()
        assert dataclasses.replace(found, began=found.began - 1).is_dead()
        other.kill()
        while Path(f"/proc/{other.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        assert found.is_dead()


def test_process_numbers_of_another_host_or_container_tell_nothing(tmp_path):
    with holder(tmp_path) as other:
        found = read_holder(tmp_path, 1)
        other.kill()
        other.wait()
    assert found.is_dead()
    assert not dataclasses.replace(found, place="another boot").is_dead()


def test_silent_holder_is_replaced_and_writes_nothing_more(tmp_path):
    """Stopped, as by a frozen host, taken over, and awake again."""
    with holder(tmp_path) as first:
        os.kill(first.pid, signal.SIGSTOP)
        said = []
        began = time.monotonic()
        lease = take_lease(tmp_path, stale_seconds=1.0, say=said.append)
        assert 1.0 <= time.monotonic() - began < 10
        assert lease.number == 2
        assert len(said) == 1
        before = snapshot(tmp_path)
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(30) == 1
        assert "LeaseLostError" in first.stderr.read()
        assert snapshot(tmp_path) == before
        lease.require()


def snapshot(folder: Path) -> dict[str, bytes]:
    """What is there, but for the count of the newest lease."""
    newest = f"lease.{newest_lease(folder)}"
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if newest != path.name
    }


def test_of_many_that_wait_one_goes_on(tmp_path):
    with holder(tmp_path) as first:
        os.kill(first.pid, signal.SIGSTOP)
        command = [sys.executable, "-c", HOLD, str(tmp_path), "1.0", "40"]
        waiting = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        ends = [each.communicate(timeout=60) for each in waiting]
    codes = sorted(each.returncode for each in waiting)
    assert codes == [0, 1, 1, 1], ends
    assert sum("held: another process runs the run" in said for _, said in ends) == 3
    assert newest_lease(tmp_path) == 2


def test_worker_writes_under_the_lease_of_its_supervisor(tmp_path):
    use_lease(tmp_path, 3)
    (tmp_path / "lease.3").write_text("")
    require_lease(tmp_path / "metrics.jsonl")
    require_lease(tmp_path.parent)
    (tmp_path / "lease.4").write_text("")
    message = r"was taken over \(lease 4 of .*\) while this process had lease 3"
    with pytest.raises(LeaseLostError, match=message):
        require_lease(tmp_path / "metrics.jsonl")


class Run:
    """What a lease is kept for."""


def test_lease_is_given_back_when_nothing_is_left_that_needs_it(tmp_path):
    lease, runs = take_lease(tmp_path), [Run(), Run()]
    lease.keep_for(runs[0])
    lease.keep_for(runs[1])
    runs.pop()
    assert not lease.is_over
    runs.pop()
    assert lease.is_over
    assert read_holder(tmp_path, 1).is_over
    assert take_lease(tmp_path, say=pytest.fail).number == 2


def test_clocks_of_hosts_are_never_compared(tmp_path):
    """A holder elsewhere whose clock is a year off is judged by its count alone."""
    other = Holder("far", "another boot", 1, 1, "2031-01-01 00:00:00", "them")
    (tmp_path / "lease.1").write_text(json.dumps(dataclasses.asdict(other)))
    assert take_lease(tmp_path, stale_seconds=0.3, say=lambda _: None).number == 2


def test_lease_that_cannot_be_read_is_waited_for(tmp_path):
    (tmp_path / "lease.7").write_text("{")
    said = []
    assert take_lease(tmp_path, stale_seconds=0.3, say=said.append).number == 8
    assert len(said) == 1
