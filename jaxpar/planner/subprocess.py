"""How are compilers that may crash isolated: each call runs in a subprocess.

Compilers for absent devices disturb ordinary runs, end the process when they fail a
check, and use as much memory as they like. `call` runs one function of jaxpar in a new
process prepared for compilers, and returns its result or reports how it ended.
"""

import contextlib
import dataclasses
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle

from jaxpar.planner.absent_devices import prepare_process

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
"""The compiler's logging environment: only messages that end the process are logged."""

_SERVE = """
import pathlib, sys
from jaxpar.planner.subprocess import serve
serve(*map(pathlib.Path, sys.argv[1:]))
"""

_LAST_LINES = 5


class CompilerProcessError(RuntimeError):
    """A planning process ended without a plan; the message says how."""


@dataclasses.dataclass(frozen=True)
class Stopped:
    """The function exited by `SystemExit`, as a command line does after ``--help``.

    Attributes:
      code: the exit code.
      out: what was printed.
      err: what was printed as an error.
    """

    code: int
    out: str
    err: str


@dataclasses.dataclass(frozen=True)
class _Failed:
    """An exception: the user's (`kind` is its type), or the compiler's."""

    kind: str
    message: str


def call(function: str, *args: Any, what: str) -> Any:
    """Call a function in a subprocess.

    Args:
      function: ``module:name``; its arguments and result are pickled.
      *args: its arguments; functions and classes of the running script are sent by
        value.
      what: the task, for errors: such as "plan of pretrain.py on h200:8x8".

    Returns:
      What it returns, or `Stopped`.

    Raises:
      ValueError: if it raised one, or an argument can't be pickled.
      CompilerProcessError: if it raised another error, or the process died.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpar-plan-") as folder:
        asked, answered = Path(folder, "asked"), Path(folder, "answered")
        printed, complained = Path(folder, "out"), Path(folder, "err")
        asked.write_bytes(_packed(function, args, what))
        with printed.open("w") as out, complained.open("w") as err:
            code = _run([asked, answered], stdout=out, stderr=err)
        if not answered.exists():
            raise CompilerProcessError(f"{what}: {_how_it_died(code, complained)}")
        answer = pickle.loads(answered.read_bytes())
        if isinstance(answer, int):
            return Stopped(answer, printed.read_text(), complained.read_text())
    if isinstance(answer, _Failed):
        if answer.kind == "ValueError":
            raise ValueError(answer.message)
        raise CompilerProcessError(f"{what}: {answer.kind}: {answer.message}")
    return answer[0]


def _packed(function: str, args: tuple[Any, ...], what: str) -> bytes:
    try:
        return cloudpickle.dumps((function, args))
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{what}: an argument can't be sent to the compiling process: {error}. "
            "Build models, losses and optimizers from functions and plain values, "
            "without open files, locks or the like."
        ) from error


def _run(files: list[Path], **streams: Any) -> int:
    """Run this module; ends with the caller, also when that is interrupted."""
    environment = {**os.environ, **_QUIET}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["COLUMNS"] = str(os.get_terminal_size().columns if _is_tty() else 100)
    command = [sys.executable, "-c", _SERVE, *map(str, files)]
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            return process.wait()
        finally:
            process.kill()  # If the wait was interrupted; otherwise it has ended.


def _is_tty() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.isatty(sys.stdout.fileno())
    return False


def _how_it_died(code: int, complained: Path) -> str:
    lines = [line for line in complained.read_text().splitlines() if line.strip()]
    last = "".join(f"\n  {line[:300]}" for line in lines[-_LAST_LINES:])
    if code == -signal.SIGKILL:
        return (
            "its process was killed, as the system does when memory runs out; plan on "
            f"a machine with more memory, or fewer at once.{last}"
        )
    if code < 0:
        return f"the compiler crashed ({signal.Signals(-code).name}).{last}"
    return f"its process ended with code {code}.{last}"


def serve(asked: Path, answered: Path) -> None:
    """Run in the process of `call`: prepare it, call, and write the result.

    Args:
      asked: the file that holds the function and its arguments.
      answered: the file to write.
    """
    prepare_process()
    function, args = pickle.loads(asked.read_bytes())
    module, _, name = function.partition(":")
    answer: Any
    try:
        answer = (getattr(importlib.import_module(module), name)(*args),)
    except SystemExit as stopped:
        answer = stopped.code if isinstance(stopped.code, int) else 1
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        answer = _Failed("ValueError", str(error))
    except (RuntimeError, MemoryError) as error:  # The compiler's errors are of these.
        answer = _Failed(type(error).__name__, _first_lines(str(error)))
    written = answered.with_suffix(".part")
    written.write_bytes(cloudpickle.dumps(answer))
    written.rename(answered)


def _first_lines(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    return "\n  ".join(line[:300] for line in lines[:_LAST_LINES]) or "no message"
