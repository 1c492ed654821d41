"""Are signals listened to, but for those that are ignored?"""

import os
import signal

from jaxpar.launch.stop_signals import listen


def test_signal_that_is_ignored_stays_so() -> None:
    """Under nohup a closed terminal does not end a run."""
    before, seen = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    try:
        listen(signal.SIGHUP, lambda number, _: seen.append(number))
        os.kill(os.getpid(), signal.SIGHUP)
        assert seen == []
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert listen(signal.SIGHUP, lambda number, _: seen.append(number)) == 0
        os.kill(os.getpid(), signal.SIGHUP)
        assert seen == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
