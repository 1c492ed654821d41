"""How often does a supervisor restart a run, and is it the only one of its host?"""

from pathlib import Path

import pytest

from jaxpar.launch.rendezvous import Board
from jaxpar.launch.supervisor import RestartBudget, only_one


def test_budget_pauses_longer_while_nothing_is_gained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    budget = RestartBudget(4)
    assert [budget.spend(progressed=p) for p in (False, False, True, False)] == [
        2.0,
        4.0,
        1.0,
        2.0,
    ]
    assert budget.spend(progressed=True) is None
    now[0] += 3601
    assert budget.spend(progressed=True) == 1.0
    with pytest.raises(ValueError, match="restarts is -1; it must be at least 0"):
        RestartBudget(-1)


def test_second_launcher_of_a_host_is_refused(tmp_path: Path) -> None:
    """The head's place is the run's lease (test_lease.py)."""
    folder = tmp_path / "run" / "launch"
    first, second = (Board(folder, host, 2, "127.0.0.1") for host in (1, 2))
    with only_one(first), only_one(second):
        again = Board(first.folder, 1, 1, "127.0.0.1")
        refusal = pytest.raises(BlockingIOError, match=r"another launcher .* as host 1")
        with refusal, only_one(again):
            pytest.fail("taken")
    with only_one(again):
        assert (first.folder / "host-0001.lock").exists()
