"""Are saves of several threads right, or refused?"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint.turns import one_at_a_time


def at_once(*calls: Callable[[], object]) -> list[Any]:
    """Call functions in a thread each; what they raise, or None."""
    together, found = threading.Barrier(len(calls)), [None] * len(calls)

    def call(place: int) -> None:
        together.wait()
        try:
            calls[place]()
        except (RuntimeError, ValueError) as error:
            found[place] = error

    threads = [
        threading.Thread(target=call, args=(place,), daemon=True)
        for place in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hung"
    return found


def tree(step: int) -> dict[str, jax.Array]:
    return {"w": jnp.full(1000, float(step))}


def saver(checkpoints: Checkpoints, step: int) -> Callable[[], None]:
    def call() -> None:
        checkpoints.save(step, tree(step))
        checkpoints.wait()

    return call


def test_steps_that_two_threads_save_are_whole_or_refused(folder: Path) -> None:
    """They wrote into each other's steps, set sound ones aside, and could hang."""
    checkpoints = Checkpoints(folder, keep=None)
    refused = 0
    for step in range(0, 12, 2):
        calls = saver(checkpoints, step), saver(checkpoints, step + 1)
        first, second = at_once(*calls)
        assert second is None
        assert first is None or "already has step" in str(first)
        refused += first is not None
    assert len(checkpoints.steps()) == 12 - refused
    for step in checkpoints.steps():
        found = checkpoints.restore(tree(0), step=step)
        assert float(found.tree["w"][0]) == step
    checkpoints.close()


def test_second_object_of_a_folder_is_refused(folder: Path) -> None:
    two = [Checkpoints(folder, keep=None) for _ in range(2)]
    errors = at_once(*(saver(each, step + 1) for step, each in enumerate(two)))
    (error,) = [each for each in errors if each]
    assert "holds another run" in str(error)
    (step,) = two[0].steps()
    assert float(two[0].restore(tree(0)).tree["w"][0]) == step
    for each in two:
        each.close()


def test_of_several_processes_one_thread_makes_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = one_at_a_time(lambda: None)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    # The thread that made calls before has ended: another may go on.
    assert at_once(call) == [None]
    call()
    (error,) = at_once(call)
    assert "let one thread make all calls" in str(error)
