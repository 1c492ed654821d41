"""How does a run read and write its own files, on a disk that fails now and then?

A network file system fails for seconds at a time. An operation that fails by an error
of that kind is tried again, with growing pauses, until it succeeds or its time is over;
then the error is raised, with the file's name. What a run can do without, as its logs,
ends in a warning instead.

`Path.exists` and its like answer False where they can't know. The questions here raise.
"""

import contextlib
import errno
import json
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS = 60.0
"""Time for an operation to succeed, if its caller gives no other."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 5.0

_NAMES = (
    *("EIO", "ESTALE", "EINTR", "EAGAIN", "ENOSPC", "EDQUOT", "ETIMEDOUT", "EBUSY"),
    *("ENFILE", "EMFILE", "ENOMEM", "ENOBUFS", "ENOLCK", "EREMOTEIO", "ENOTCONN"),
    *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ESHUTDOWN", "EHOSTDOWN"),
    *("EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
)
TRANSIENT = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))
"""Errors that may go away by themselves, or by somebody who makes room."""


class _Thread(threading.local):
    is_inside = False


_thread = _Thread()
"""Whether this thread is inside an operation that is repeated."""
_failing: set[Path] = set()
"""Files that a warning has named, and that have not been written since."""
_unwritten: dict[Path, bytes] = {}
"""Lines of logs that wait for their disk."""
_MOST_UNWRITTEN = _MOST_BYTES = 16 << 20


def pauses(seconds: float | None = None) -> Iterator[float]:
    """Pauses in seconds that double, and sum up to a time; None for `SECONDS`."""
    left, pause = SECONDS if seconds is None else seconds, _FIRST_PAUSE
    while left > 0:
        yield min(pause, left)
        left -= pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def retried(
    operation: Callable[[], T],
    path: Path,
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call a function until it raises no transient error of the disk.

    Args:
      operation: can be repeated after it has failed half-way. What it calls is tried
        once: this function repeats the whole.
      path: that it works on.
      seconds: until the last try; None for `SECONDS`, 0 for one try.
      clock: in seconds.
      sleep: waits for that many seconds.

    Returns:
      What the function returns.

    Raises:
      OSError: the last error, with the path.
    """
    until, pause = clock() + (SECONDS if seconds is None else seconds), _FIRST_PAUSE
    while True:
        was_inside, _thread.is_inside = _thread.is_inside, True
        try:
            return operation()
        except OSError as error:
            if error.errno is not None and error.filename is None:
                error.filename = os.fspath(path)
            is_last = was_inside or clock() + pause > until
            if error.errno not in TRANSIENT or is_last:
                raise
        finally:
            _thread.is_inside = was_inside
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def attempted(operation: Callable[[], object], path: Path) -> bool:
    """Do what a run can go on without; whether it succeeded.

    Args:
      operation: as in `retried`. Once a file's time is over it is tried once a call.
      path: that it works on.

    Warns:
      UserWarning: with the path, when it begins to fail.
    """
    try:
        retried(operation, path, seconds=0.0 if path in _failing else None)
    except OSError as error:
        if path not in _failing:
            _failing.add(path)
            warnings.warn(
                f"{str(path)!r} can't be written or read ({error.strerror or error}): "
                "the run goes on without it",
                stacklevel=3,
            )
        return False
    _failing.discard(path)
    return True


def read(path: Path, *, at_most: int | None = None) -> bytes | None:
    """The content of a file; None if there is none.

    Args:
      path: the file.
      at_most: bytes that are read; None for all.
    """

    def content() -> bytes:
        with path.open("rb") as file:
            if at_most is None:
                return file.read()
            # A buffer of this size is made first.
            return file.read(min(os.fstat(file.fileno()).st_size, at_most))

    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return retried(content, path)
    return None


def read_json(path: Path) -> Any:
    """The value of a file of JSON; None if there is none, or it is damaged."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(read(path, at_most=_MOST_BYTES) or b"null")
    return None


def write_whole(
    path: Path, content: str | bytes, *, durable: bool = False, private: bool = False
) -> None:
    """Replace a file: others find what it was, or the new content, never a part of it.

    Args:
      path: the file; one process writes it.
      content: what it will hold.
      durable: whether it must outlast the host's end once this has returned.
      private: whether only this user may read it.
    """
    unfinished = path.with_name(path.name + ".tmp")
    text = content.encode() if isinstance(content, str) else content

    def write() -> None:
        with unfinished.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)

    retried(write, path)


def append(path: Path, lines: str) -> None:
    """Add lines to a log, which no disk can make end a run.

    Lines that can't be written wait in memory, and are written with later ones.
    """
    waiting = (_unwritten.get(path, b"") + lines.encode())[-_MOST_UNWRITTEN:]
    _unwritten[path] = waiting
    sizes: list[int] = []

    def write() -> None:
        with path.open("ab", buffering=0) as file:
            sizes.append(file.seek(0, os.SEEK_END))
            if sizes[0] < sizes[-1]:  # A part was written before it failed.
                file.truncate(sizes[0])
            left = memoryview(waiting)
            while left:
                left = left[file.write(left) :]

    if attempted(write, path):
        del _unwritten[path]


def unwritten(path: Path) -> int:
    """Lines of a log that could not be written so far."""
    return _unwritten.get(path, b"").count(b"\n")


def exists(path: Path) -> bool:
    """Whether there is a file or a folder of a name."""
    return _mode(path) != 0


def is_folder(path: Path) -> bool:
    """Whether a path is a folder's."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether a path is a file's."""
    return stat.S_ISREG(_mode(path))


def is_private(path: Path) -> bool:
    """Whether a file is there that only its user may read."""
    mode = _mode(path)
    return mode != 0 and not mode & 0o077


def is_link(path: Path) -> bool:
    """Whether what is there is a symbolic link."""
    return stat.S_ISLNK(retried(lambda: path.lstat().st_mode, path))


def names_in(folder: Path) -> list[str]:
    """The sorted names in a folder; an empty list if it does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(retried(lambda: os.listdir(folder), folder))
    return []


def set_aside(path: Path) -> Path:
    """Rename what is damaged to a free name that ends in ".damaged"; that name."""
    new, number = path.with_name(f"{path.name}.damaged"), 2
    while exists(new):
        new, number = path.with_name(f"{path.name}.damaged.{number}"), number + 1
    retried(lambda: path.rename(new), path)
    return new


def _mode(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return retried(lambda: path.stat().st_mode, path)
    return 0
