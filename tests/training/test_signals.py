"""Is a signal noticed within the block, and left alone outside it?"""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from jaxpar.launch.exit_codes import SAVE_FAILED, STOPPED
from jaxpar.launch.stop_signals import STOPPING
from jaxpar.training.signals import RunStopped, StopSignals


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """Signals as a terminal has them: in the background a shell ignores SIGINT."""
    default = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, own) for number, own in default.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_process_whose_save_hangs_ends_within_its_limit(capfd) -> None:
    ended, noted = threading.Event(), []
    codes = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with StopSignals(0.05, noted.append, end):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(30)
    assert codes == [SAVE_FAILED]
    assert "0.05 s ago" in noted[0]
    said = capfd.readouterr().err
    assert noted[0] in said
    assert "test_process_whose_save_hangs" in said, "the stacks"


def test_process_that_ends_in_time_is_left_alone() -> None:
    codes = []
    with StopSignals(0.2, lambda why: None, codes.append):
        os.kill(os.getpid(), signal.SIGTERM)
    for thread in threading.enumerate():
        if thread.name == "stop":
            thread.join()
    assert codes == []


def test_signal_to_another_process_counts_too(monkeypatch) -> None:
    """It reaches a process that hangs through jax's service alone."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jaxpar.training.signals._POLL_SECONDS", 0.01)

    class Client:
        def key_value_try_get(self, key: str) -> str:
            assert key == "RECEIVED_PREEMPTION_NOTICE"
            return "now"

    monkeypatch.setattr("jax._src.distributed.global_state.client", Client())
    ended = threading.Event()
    with StopSignals(0.05, lambda why: None, lambda code: ended.set()):
        assert ended.wait(30)
