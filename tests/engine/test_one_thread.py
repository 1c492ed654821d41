"""Is a second thread refused while the first is in a call, and let in after it?"""

import threading

import pytest

from jaxpar.engine.one_thread import OneThread


def refused_in_another_thread(guard: OneThread, method: str) -> str:
    """The error that another thread gets; empty if it gets none."""
    found = []

    def call() -> None:
        try:
            with guard.calling(method):
                found.append("")
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    return found[0]


def test_second_thread_is_refused_with_the_name_of_its_call():
    guard = OneThread("loader")
    with guard.calling("next"):
        message = refused_in_another_thread(guard, "set_state")
    assert message == (
        "loader.set_state: another thread is in a method of this loader. Call it from "
        "one thread, or hold a lock around the calls."
    )


def test_same_thread_may_call_within_a_call():
    guard = OneThread("engine")
    with guard.calling("step"), guard.calling("save"):
        pass
    assert refused_in_another_thread(guard, "step") == ""


def test_inner_call_that_ends_leaves_the_outer_one_alone():
    guard = OneThread("engine")
    with guard.calling("step"):
        with guard.calling("save"):
            pass
        assert refused_in_another_thread(guard, "step")


def test_call_that_fails_lets_the_next_thread_in():
    guard = OneThread("engine")
    with pytest.raises(KeyError), guard.calling("step"):
        raise KeyError
    assert refused_in_another_thread(guard, "step") == ""
