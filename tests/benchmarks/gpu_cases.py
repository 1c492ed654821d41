"""Cases for tests/benchmarks/test_gpu_day.py, each run in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.session import NotHereError, Rows, Session


def works(session: Session, number: int = 1) -> Rows:
    (session.keep / "program.txt").write_text("HLO " * 100)
    yield "first", {"number": number}
    yield "second", {"number": 2 * number}


def fails(session: Session) -> Rows:
    yield "before", {"number": 1}
    raise ValueError("this case is wrong")


def needs_more(session: Session) -> Rows:
    yield from ()
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")


def is_not_here(session: Session) -> Rows:
    yield from ()
    raise NotHereError("no torch")


def hangs(session: Session, file: str) -> Rows:
    """Start a process, name it in a file, and wait for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(child.pid))
    yield "begun", {"pid": os.getpid()}
    time.sleep(600)


def leaves_one_behind(session: Session, file: str) -> Rows:
    """End, but not the process of a session of its own that could still print."""
    yield "first", {"number": 1}
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    Path(file).write_text(str(child.pid))
