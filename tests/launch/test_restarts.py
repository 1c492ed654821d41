"""How often does a supervisor restart a run?"""

import pytest

from jaxpar.launch.rendezvous import Outcome, WorkerEnd
from jaxpar.launch.restarts import GONE, HostFailures, RestartBudget, failed_hosts


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


def test_restart_comes_back_once_the_run_has_saved_more() -> None:
    """A run that fails every ten minutes goes on, as long as it gets further."""
    budget = RestartBudget(3)
    for saved in range(0, 2000, 100):
        assert budget.spend(progressed=True, resumed=saved) is not None
    # From here on it goes on from the same step each time.
    assert [budget.spend(progressed=True, resumed=1900) is None for _ in range(3)] == [
        False,
        False,
        True,
    ]
    # Back to a step of before, as after a checkpoint that was damaged, is no progress.
    assert budget.spend(progressed=True, resumed=1500) is None
    assert budget.spend(progressed=True, resumed=1900) is None
    assert budget.spend(progressed=True, resumed=2000) is not None


def ended(*codes: int | None, kind: str = "failed") -> Outcome:
    workers = [WorkerEnd(i, c, "step", 0, 3, None, [], []) for i, c in enumerate(codes)]
    return Outcome(kind, 1, "why", workers)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({0: ended(0, kind="done"), 1: ended(1)}, [1]),
        ({0: ended(1), 1: ended(1)}, []),
        ({0: ended(1), 1: ended(1, -9), 2: ended(-6)}, [1]),
        ({0: ended(-6), 1: ended(None, kind="ended")}, [0]),
        ({0: ended(-6), 1: GONE, 2: ended(-9)}, [1]),
        ({0: ended(None, kind="ended"), 1: ended(None, kind="stalled")}, [1]),
        ({0: ended(None, kind="stalled"), 1: ended(None, kind="stalled")}, []),
        ({0: ended(75, kind="stopped"), 1: ended(75, kind="saved")}, []),
    ],
)
def test_host_is_blamed_where_it_is_certain(outcomes: dict, expected: list) -> None:
    assert failed_hosts(outcomes) == expected


def test_failures_of_a_day_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    failures = HostFailures()
    bad = {0: ended(None, kind="ended"), 4: ended(-9)}
    assert failures.count(bad) == []
    now[0] += 86_000
    assert failures.count(bad) == []
    assert failures.count({1: ended(-9), 4: ended(None, kind="ended")}) == []
    now[0] += 600
    assert failures.count(bad) == [], "the first was a day ago"
    assert failures.count(bad) == [4]
