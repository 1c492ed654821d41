"""Do supervisors agree through their files, and tell the living from the dead?"""

import dataclasses
from pathlib import Path

from jaxpar.launch.rendezvous import (
    Attempt,
    Board,
    Outcome,
    WorkerEnd,
    cause_of,
    wait_until,
)

ATTEMPT = Attempt(
    number=3,
    state="run",
    coordinator="10.0.0.1:99",
    members={0: "a", 1: "b", 2: "c"},
    processes={0: 2, 1: 4, 2: 2},
    planned=8,
)


def boards(folder: Path) -> list[Board]:
    return [Board(folder, host, 2, "127.0.0.1") for host in range(2)]


def test_members_read_each_other_whole(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    end = WorkerEnd(2, -9, "step, step 4", 0, 4, "ValueError: no", ["a", "b"], [])
    outcome = Outcome("failed", 1, "worker 2 was killed", [end])
    second.publish(attempt=3, outcome=outcome)
    assert first.member(1) == second.me
    assert first.member(1).outcome == outcome
    assert first.member(0) is None


def test_attempts_are_read_as_announced(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    assert second.attempt() is None
    first.announce(ATTEMPT)
    assert second.attempt() == ATTEMPT
    assert [ATTEMPT.first_worker(host) for host in range(3)] == [0, 2, 6]


def test_member_is_alive_while_its_count_changes(tmp_path: Path) -> None:
    """A file that was there before may be of a supervisor that is long gone."""
    first, second = boards(tmp_path)
    second.publish()
    silent = first.silent_seconds(first.member(1), unseen=60.0)
    assert silent >= 60
    second.publish()
    assert first.silent_seconds(first.member(1), unseen=60.0) < 1
    replaced = dataclasses.replace(second.me, id="another", count=1)
    assert first.silent_seconds(replaced, unseen=60.0) >= 60


def test_plan_stays_that_of_the_first_launch(tmp_path: Path) -> None:
    first, second = boards(tmp_path)
    assert first.planned(4) == 4
    assert second.planned(2) == 4


def test_folder_is_private(tmp_path: Path) -> None:
    Board(tmp_path / "launch", 0, 1, "127.0.0.1")
    assert (tmp_path / "launch").stat().st_mode & 0o777 == 0o700


def test_waiting_ends_with_the_time() -> None:
    asked = []
    assert wait_until(lambda: None, 0.05, lambda: asked.append(1)) is None
    assert asked
    assert wait_until(lambda: 7, 1.0, lambda: None) == 7


def test_what_is_final_decides_then_what_failed_by_itself() -> None:
    def of(*kinds: str) -> str:
        return cause_of({i: Outcome(k, 1, k, []) for i, k in enumerate(kinds)}).kind

    assert of("done", "done") == "done"
    assert of("ended", "failed") == "failed"
    assert of("failed", "stalled") == "stalled"
    assert of("stalled", "refused") == "refused"
    assert of("saved", "stopped") == "stopped", "asked of one, and all have saved"
