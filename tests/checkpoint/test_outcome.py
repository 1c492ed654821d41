"""Do processes learn of a failed save at once, and act on it at one step?"""

import threading
import time
from collections.abc import Callable, Iterator

import jax
import pytest

from jaxpar.checkpoint import outcome as module
from jaxpar.checkpoint.outcome import FailedElsewhereError, SaveOutcome


class Service:
    """jax's key-value store, in memory."""

    def __init__(self):
        self.held: dict[str, str] = {}
        self._lock = threading.Lock()

    def key_value_set(
        self, key: str, value: str, allow_overwrite: bool = False
    ) -> None:
        assert allow_overwrite or key not in self.held
        self.held[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self.held:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.held[key]

    def key_value_increment(self, key: str, by: int) -> None:
        with self._lock:
            self.held[key] = str(int(self.held.get(key, 0)) + by)

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(k, v) for k, v in list(self.held.items()) if k.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        for each, _ in self.key_value_dir_get(key):
            del self.held[each]


Make = Callable[[int], list[SaveOutcome]]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def make(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Outcomes of one save, of three processes."""
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.005)
    made: list[SaveOutcome] = []

    def outcomes(number: int) -> list[SaveOutcome]:
        found = [SaveOutcome(number, 10, service, (index, 3)) for index in range(3)]
        made.extend(found)
        return found

    yield outcomes
    for each in made:
        each.close()


def test_all_act_at_one_step_that_none_has_passed(make: Make) -> None:
    """However far one is ahead of another when they learn of the failure."""
    outcomes = make(0)
    at: list[int] = [0] * 3

    def train(index: int) -> None:
        for step in range(11, 400):
            if outcomes[index].has_failed(step):
                at[index] = step
                return
            time.sleep(0.002 * (index + 1))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    outcomes[1].fail("no room")
    for thread in threads:
        thread.join(60)
    assert at[0] == at[1] == at[2] > 10


def test_process_at_a_barrier_is_told_which_one_has_failed(make: Make) -> None:
    first, second, _ = make(0)
    found: list[str] = []

    def wait() -> None:
        with pytest.raises(FailedElsewhereError) as raised:
            first.wait_for_all("written", 60.0)
        found.append(str(raised.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    second.fail("no room")
    waiting.join(30)
    assert found == ["process 1: no room"]


def test_barrier_ends_with_all_or_with_its_time(make: Make) -> None:
    outcomes = make(0)
    threads = [
        threading.Thread(target=each.wait_for_all, args=("written", 60.0))
        for each in outcomes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(TimeoutError, match="merged: not all processes within"):
        outcomes[0].wait_for_all("merged", 0.01)


def test_each_gets_its_value_and_the_first_those_of_all(make: Make) -> None:
    outcomes = make(0)
    found: list[list[int]] = [[]] * 3

    def share(index: int) -> None:
        values = [1, 10, 100] if index == 0 else None
        own = outcomes[index].scatter("values", values, 60.0)
        found[index] = outcomes[index].gather("doubled", 2 * own, 60.0)

    threads = [threading.Thread(target=share, args=(i,)) for i in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [[2, 20, 200], [], []]


def test_value_of_a_process_that_has_failed_is_not_waited_for(make: Make) -> None:
    first, second, third = make(0)
    third.gather("values", 3, 60.0)
    with pytest.raises(TimeoutError, match=r"values/1: not sent within 0\.01 s"):
        first.gather("values", 1, 0.01)
    second.fail("no room")
    with pytest.raises(FailedElsewhereError, match="process 1: no room"):
        first.gather("values", 1, 60.0)
    with pytest.raises(FailedElsewhereError, match="process 1: no room"):
        third.scatter("shares", None, 60.0)


def test_failure_of_one_save_is_none_of_the_next(make: Make, service: Service) -> None:
    make(0)[2].fail("no room")
    for each in (after := make(1)):
        each.require_sound()
        assert not each.has_failed(11)
    assert not service.key_value_dir_get("jaxpar/save/0/")
    del after


def test_one_process_needs_no_service() -> None:
    alone = SaveOutcome(0, 3, place=(0, 1))
    alone.wait_for_all("written", 0.0)
    assert alone.scatter("values", [7], 0.0) == 7
    assert alone.gather("values", 7, 0.0) == [7]
    assert not alone.has_failed(4)
    alone.fail("no room")
    assert alone.has_failed(5)
