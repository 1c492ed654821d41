"""Is it found which worker holds the others up, and why?"""

import jax
import pytest

from jaxpar.training.stragglers import (
    FIELDS,
    Slow,
    StragglerDetector,
    _reason,
    describe_slow,
    own_times,
)


def worker(step: float, data: float, work: float) -> dict[str, float]:
    return dict(zip(FIELDS, (step, data, work, 1.0), strict=True))


def test_workers_that_are_alike_take_one_each() -> None:
    assert own_times([worker(0.5, 0.01, 0.002)] * 4) == pytest.approx([1.0] * 4)


def test_devices_that_take_twice_as_long_count_twice() -> None:
    """All step times are those of the slow one."""
    alike, slow = worker(0.5, 0.0, 0.002), worker(0.5, 0.0, 0.004)
    assert own_times([alike, slow, alike]) == pytest.approx([1.0, 2.0, 1.0])
    assert own_times([alike, slow]) == pytest.approx([1.0, 2.0])


def test_data_that_take_as_long_as_the_step_count_twice() -> None:
    """The others wait inside the step for the one that waits for its data."""
    alike, slow = worker(0.4, 0.0, 0.002), worker(0.4, 0.2, 0.002)
    assert own_times([alike, slow]) == pytest.approx([1.0, 2.0])
    assert "waiting for its data took 0.2 s" in _reason([alike, slow], 1)


def test_reason_names_the_devices() -> None:
    alike, slow = worker(0.4, 0.01, 0.002), worker(0.4, 0.012, 0.006)
    assert "the same work on its devices took 0.006 s" in _reason([alike, slow], 1)
    assert describe_slow(Slow(1, 2.04, "why")).startswith(
        "worker 1 is 2.0 times as slow"
    )


def test_one_process_measures_nothing() -> None:
    stragglers = StragglerDetector(1, 1.5)
    assert not any(stragglers.step(step, 0.1) for step in range(5))
    assert stragglers.collect() == ({}, [])


def test_slow_worker_is_named_once_it_is_so_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    stragglers = StragglerDetector(5, 1.5)
    assert [step for step in range(1, 11) if stragglers.step(step, 0.0)] == [5, 10]
    alike, slow = worker(0.4, 0.0, 0.002), worker(0.4, 0.0, 0.006)
    named = []
    for second in (slow, slow, alike, slow, slow, slow, slow):
        rows = [[each[name] for name in FIELDS] for each in (alike, second)]
        stragglers._gathered = jax.numpy.array(rows)
        numbers, found = stragglers.collect()
        named.append([each.worker for each in found])
    assert named == [[], [], [], [], [], [1], []]
    assert numbers["workers/memory_gb_max"] == 1.0
    assert numbers["workers/step_seconds_median"] == pytest.approx(0.4)
