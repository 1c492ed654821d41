"""Is a signal noticed within the block, and left alone outside it?"""

import os
import signal
import threading

import pytest

from jaxpar.launch.exit_codes import STOPPED
from jaxpar.launch.stop_signals import STOPPING
from jaxpar.training.signals import RunStopped, StopSignals


@pytest.mark.parametrize("number", STOPPING)
def test_signal_is_asked_for_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.asked(1) is None
        os.kill(os.getpid(), number)
        assert signals.asked(2) == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_second_interrupt_ends_the_program_at_once() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.asked(1) == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_set_no_handlers():
    found = []

    def run() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with StopSignals() as signals:
            found.append(signal.getsignal(signal.SIGTERM) is before)
            found.append(signals.asked(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True, None]


def test_of_several_processes_all_are_told_at_one_step(monkeypatch):
    """jax's service listens to SIGTERM only: SIGUSR1 is passed on as that."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    due = iter([False, True])
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point",
        lambda step: next(due),
    )
    sent = []
    with StopSignals() as signals:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
            signal.raise_signal(signal.SIGUSR1)
        assert sent == [(os.getpid(), signal.SIGTERM)]
        assert signals.asked(1) is None
        assert signals.asked(2) == "SIGTERM"


def test_run_that_stops_ends_the_script_with_its_code():
    stopped = RunStopped(STOPPED, "saved at step 3")
    assert isinstance(stopped, SystemExit)
    assert (stopped.code, str(stopped)) == (STOPPED, "saved at step 3")
