"""How often does a supervisor restart a run?"""

import pytest

from jaxpar.launch.restarts import RestartBudget


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
