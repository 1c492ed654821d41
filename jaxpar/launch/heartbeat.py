"""What is a worker doing, as other processes of its host can read at any time?

A few numbers in a small mapped file. They are written without a system call, and remain
when the worker is stopped or killed.
"""

import dataclasses
import functools
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxpar.launch.own_files import attempted, read, retried
from jaxpar.launch.worker_environment import current

PHASES = (
    "start",
    "restore",
    "compile",
    "step",
    "data",
    "save",
    "evaluate",
    "replay",
    "end",
)
"""A worker's phases; "data" is waiting for a batch, "replay" taking a step again."""

_FORM = struct.Struct("<QBqqd")  # Writes so far, phase, step, resumed at, since when.
_NONE = -1


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a worker was doing.

    Attributes:
      phase: one of `PHASES`.
      step: the step in progress or done last; None before the first.
      resumed: the step that it resumed from; None before that.
      since: start of the phase, on this host's monotonic clock, in seconds.
    """

    phase: str
    step: int | None
    resumed: int | None
    since: float

    def __str__(self) -> str:
        at = "" if self.step is None else f", step {self.step}"
        return f"{self.phase}{at}"


class Heartbeat:
    """Writes what this process is doing.

    Args:
      path: of the file, which is created; None to write nowhere.
    """

    def __init__(self, path: Path | None):
        self._map: mmap.mmap | None = None
        self._writes = 0
        self.phase = PHASES[0]
        self._step: int | None = None
        self._resumed: int | None = None
        if path is not None:
            attempted(lambda: self._open(path), path)
        self._write()

    def _open(self, path: Path) -> None:
        with path.open("w+b") as file:
            # Not a hole: a page that a full disk can't take would end the process.
            file.write(bytes(_FORM.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _FORM.size)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase; `step` None leaves the step as it is."""
        self.phase = phase
        self._step = self._step if step is None else step
        self._write()

    def resume(self, step: int) -> None:
        """Record the step that the run resumes from."""
        self._step = self._resumed = step
        self._write()

    def _write(self) -> None:
        if self._map is None:
            return
        # Odd while the fields are written, so that a reader retries.
        self._writes += 2
        struct.pack_into("<Q", self._map, 0, self._writes - 1)
        _FORM.pack_into(
            self._map,
            0,
            self._writes - 1,
            PHASES.index(self.phase),
            _NONE if self._step is None else self._step,
            _NONE if self._resumed is None else self._resumed,
            time.monotonic(),
        )
        struct.pack_into("<Q", self._map, 0, self._writes)


class BeatFile:
    """The heartbeat of another process of this host, read many times a second.

    The file stays open: to open it is work for a shared disk, to read it is not, as
    what the other process has written is in this host's memory.

    Args:
      path: of the file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO | None = None

    def read(self) -> Beat | None:
        """What the process is doing; None before its first write."""
        try:
            return _beat(self._content)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _content(self) -> bytes | None:
        if self._file is None:
            try:
                self._file = retried(lambda: self._path.open("rb"), self._path)
            except FileNotFoundError:
                return None
        number = self._file.fileno()
        return retried(lambda: os.pread(number, _FORM.size, 0), self._path)


def read_heartbeat(path: Path) -> Beat | None:
    """Read once what another process is doing; None before its first write."""
    return _beat(lambda: read(path))


def _beat(read_content: Callable[[], bytes | None]) -> Beat | None:
    for _ in range(3):
        content = read_content()
        if content is None or len(content) < _FORM.size:
            return None
        writes, phase, step, resumed, since = _FORM.unpack_from(content)
        if writes % 2 == 0 and 0 <= phase < len(PHASES):
            return Beat(
                phase=PHASES[phase],
                step=None if step == _NONE else step,
                resumed=None if resumed == _NONE else resumed,
                since=since,
            )
    return None


@functools.cache
def own_heartbeat() -> Heartbeat:
    """This process's heartbeat; without a supervisor it is written nowhere."""
    worker = current()
    return Heartbeat(None if worker is None else worker.heartbeat)
