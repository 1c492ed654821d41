"""How does a case run: in a process of its own, until its limit, read line by line."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.gpu.lines import CUT, DONE, FAILED, SKIPPED, TOO_LARGE

MARK = "@@"
"""Starts a line of JSON, for libraries print to the same place."""
_TAIL, _POLL_SECONDS = 25, 0.1
_OUT_OF_MEMORY = ("resource_exhausted", "out of memory", "outofmemory")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
      event: one of `benchmarks.gpu.lines`.
      seconds: that it took.
      why: of a case that is not done: the reason, and the end of its output.
    """

    event: str
    seconds: float
    why: str = ""


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    limit: float,
    is_own_limit: bool,
    receive: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Run a case, and end it and all that it started when it has ended or is late.

    Args:
      command: of the case.
      environment: variables, all of them.
      log: a file for its output.
      limit: seconds until it is ended.
      is_own_limit: whether the limit is the case's; else the call's time is over,
        which is no failure of the case.
      receive: called with each result as soon as it is printed.

    Returns:
      How it ended.
    """
    began = time.monotonic()
    why_skipped = ""
    # A file, not a pipe: a process that outlives the case could keep a pipe open.
    with log.open("wb") as output, log.open("rb") as printed:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for value in _values(process, printed, began + limit):
                if "skip" in value:
                    why_skipped = value["skip"]
                else:
                    receive(value)
            code = process.poll()
        finally:
            _end(process)
    seconds = time.monotonic() - began
    if code == 0:
        event = SKIPPED if why_skipped else DONE
        return Outcome(event, seconds, why_skipped)
    return _failure(code, seconds, log, limit=limit, is_own_limit=is_own_limit)


def _failure(
    code: int | None, seconds: float, log: Path, *, limit: float, is_own_limit: bool
) -> Outcome:
    """Why a case is not done; `code` is None if it was ended."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = "\n".join(line[:500] for line in lines[-_TAIL:])
    if code is None:
        event = FAILED if is_own_limit else CUT
        return Outcome(event, seconds, f"ended after {limit:.0f} s\n{tail}")
    if any(word in tail.lower() for word in _OUT_OF_MEMORY):
        return Outcome(TOO_LARGE, seconds, f"out of memory\n{tail}")
    return Outcome(FAILED, seconds, f"exit status {code}\n{tail}")


def _values(
    process: "subprocess.Popen[bytes]", printed: BinaryIO, until: float
) -> Iterator[dict[str, Any]]:
    """Results as they are printed, until the process ends or a time."""
    rest, has_ended = b"", False
    while not has_ended and time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=min(_POLL_SECONDS, max(0.0, until - time.monotonic())))
        has_ended = process.poll() is not None
        *whole, rest = (rest + printed.read()).split(b"\n")
        for line in whole:
            value = _value_of(line.decode(errors="replace"))
            if value is not None:
                yield value


def _value_of(line: str) -> dict[str, Any] | None:
    """The JSON of a marked line."""
    if not line.startswith(MARK):
        return None
    try:
        value = json.loads(line.removeprefix(MARK))
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it started; that they are gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
