"""A worker: joins the others, then runs the script that was launched.

    python -m jaxpar.launch.worker SCRIPT [FLAGS]

A supervisor starts it with a `Worker` in its environment. Its fatal error is written to
a file, which the supervisor reports once instead of every worker.
"""

import contextlib
import ctypes
import faulthandler
import functools
import os
import runpy
import signal
import sys
from pathlib import Path
from types import TracebackType

from jaxpar.launch.exit_codes import REFUSED
from jaxpar.launch.group import STACKS_SIGNAL
from jaxpar.launch.heartbeat import own_heartbeat
from jaxpar.launch.own_files import retried
from jaxpar.launch.worker_environment import Worker, current, say_error

_PR_SET_PDEATHSIG = 1

_REFUSALS = (ValueError, TypeError, OSError, ImportError)
"""Errors of a script before it trains that mean its arguments can't work."""


def main(args: list[str]) -> None:
    """Run a script as one worker of a group."""
    worker = current()
    if worker is None:
        raise SystemExit(
            "jaxpar.launch.worker is started by a supervisor: use `jaxpar launch`"
        )
    end_with_parent()
    stacks = retried(lambda: worker.stacks.open("w"), worker.stacks)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    heartbeat = own_heartbeat()
    sys.excepthook = functools.partial(_end_by, worker)
    try:
        _run_script(worker, args)
    except SystemExit as ended:
        if ended.code not in (0, None):
            _end(worker, str(ended), _code(ended))
    heartbeat.enter("end")


def _run_script(worker: Worker, args: list[str]) -> None:
    # They import jax, which is slow; the heartbeat and the stack dumps work before.
    from jaxpar.launch.join import join, use_private_cache  # noqa: PLC0415

    use_private_cache()
    join(worker)
    script = Path(args[0])
    sys.argv = args
    sys.path[0] = str(script.parent.absolute())
    runpy.run_path(str(script), run_name="__main__")


def _end_by(
    worker: Worker,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """The hook that Python calls with an uncaught exception."""
    sys.__excepthook__(kind, error, trace)
    refuses = own_heartbeat().phase == "start" and isinstance(error, _REFUSALS)
    _end(worker, f"{kind.__name__}: {error}", REFUSED if refuses else 1)


def _end(worker: Worker, error: str, code: int) -> None:
    """Write the error and end here: JAX's own end would wait for the others."""
    with contextlib.suppress(OSError):
        say_error(worker, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code(ended: SystemExit) -> int:
    """The code that Python would end with; that of argument parsers is a refusal."""
    if isinstance(ended.code, int):
        return REFUSED if ended.code == 2 else ended.code
    print(ended.code, file=sys.stderr)
    return 1


def end_with_parent() -> None:
    """Make the system end this process when its parent is killed (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
