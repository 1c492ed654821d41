"""Do supervisors agree through their files, and tell the living from the dead?"""

import dataclasses

from jaxpar.launch.rendezvous import (
    Attempt,
    Outcome,
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


def test_workers_of_the_leading_host_come_first() -> None:
    """The first one listens, at an address and a port of its own host."""
    assert [ATTEMPT.first_worker(host) for host in range(3)] == [0, 2, 6]
    led = dataclasses.replace(ATTEMPT, head=1)
    assert [led.first_worker(host) for host in range(3)] == [4, 0, 6]


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
