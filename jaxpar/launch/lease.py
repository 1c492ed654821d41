"""Who may write into a run's folder: the process with the newest lease of it.

A lease is a file, ``lease.<n>``, made by linking a finished one to that name, which one
process can do. Its holder writes a growing count into it. Another process takes the
next number once the holder has given its own back, or is dead on this host, or the
count has not grown for long enough by the observer's own clock; no two hosts' clocks
are compared. A holder that was stopped meanwhile finds the higher number before its
next commit, and ends without it.
"""

import atexit
import contextlib
import dataclasses
import datetime
import getpass
import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from jaxpar.launch.object_stores import is_url
from jaxpar.launch.own_files import names_in, retried, write_whole
from jaxpar.launch.typed_json import read_record

BEAT_SECONDS = 1.0
STALE_SECONDS = 60.0
"""Silence after which a lease may be taken from its holder."""

_NAME = re.compile(r"lease\.(\d+)")


class LeaseLostError(RuntimeError):
    """Another process has taken a run's folder over."""


class LeaseHeldError(BlockingIOError):
    """Another process holds a run's folder."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """What a lease's file says.

    Attributes:
      hostname: where the holder runs.
      place: of its process numbers: this start of the host, and the container.
      pid: its process.
      began: when that process began, in the kernel's ticks; None if unknown.
      since: when it took the lease, by its own clock, for people to read.
      user: its name.
      count: of its writes.
      is_over: whether it has given the lease back.
    """

    hostname: str
    place: str
    pid: int
    began: int | None
    since: str
    user: str
    count: int = 0
    is_over: bool = False

    def __str__(self) -> str:
        return (
            f"process {self.pid} of {self.user} on {self.hostname}, since {self.since}"
        )

    def is_dead(self) -> bool:
        """Whether its process has ended, as seen from here; False if unknown."""
        if self.place != process_place() or self.began is None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):  # Another user's, or no process.
            return False
        began = _process_start(self.pid)
        return began is not None and began != self.began


class Lease:
    """A lease of a run's folder, by its number.

    Args:
      folder: the run's.
      number: of the lease.
      holder: this process's own entry; None for a lease that another one keeps alive
        for it, as a supervisor for its workers.
      beat_seconds: between two writes of the count.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        holder: Holder | None = None,
        beat_seconds: float = BEAT_SECONDS,
    ):
        self.folder, self.number = folder, number
        self._holder, self._seconds = holder, beat_seconds
        self._over, self._alone = threading.Event(), threading.Lock()
        self._users = 0
        if holder is not None:
            threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def require(self) -> None:
        """Check that nobody has taken the folder over.

        Raises:
          LeaseLostError: if somebody has.
        """
        newest = newest_lease(self.folder)
        if newest > self.number:
            raise LeaseLostError(
                f"{str(self.folder)!r} was taken over (lease {newest} of "
                f"{read_holder(self.folder, newest)}) while this process had lease "
                f"{self.number}: it writes nothing more. Start one of them again to go "
                "on alone"
            )

    def is_lost(self) -> bool:
        """Whether somebody has taken the folder over."""
        return newest_lease(self.folder) > self.number

    @property
    def is_over(self) -> bool:
        """Whether it was given back."""
        return self._over.is_set()

    def keep_for(self, user: object) -> None:
        """Give the lease back when all objects that it is kept for are gone."""
        self._users += 1
        weakref.finalize(user, self._drop)

    def _drop(self) -> None:
        self._users -= 1
        if not self._users:
            self.give_back()

    def give_back(self) -> None:
        """Let another process take the folder at once; safe to call twice."""
        if self._holder is None or self._over.is_set():
            return
        self._over.set()
        with self._alone, contextlib.suppress(OSError):  # The folder may be deleted.
            if not self.is_lost():
                self._write(is_over=True)

    def _beat(self) -> None:
        while not self._over.wait(self._seconds):
            # A full disk: others may think that this one is dead.
            with self._alone, contextlib.suppress(OSError):
                if self._over.is_set() or self.is_lost():
                    return
                self._write()

    def _write(self, **changes: bool) -> None:
        assert self._holder is not None
        count = self._holder.count + 1
        self._holder = dataclasses.replace(self._holder, count=count, **changes)
        path = self.folder / f"lease.{self.number}"
        write_whole(path, json.dumps(dataclasses.asdict(self._holder)))


_held: dict[Path, Lease] = {}
_elsewhere: dict[str, Path] = {}
"""URL of checkpoints -> the folder of their run."""
"""The leases of this process, by folder."""


def take_lease(
    folder: Path,
    *,
    stale_seconds: float = STALE_SECONDS,
    beat_seconds: float = BEAT_SECONDS,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    silent: Holder | None = None,
) -> Lease:
    """Take the lease of a run's folder, or find that another process holds it.

    A process that holds it gets it again. It is given back when the process ends, or
    when nothing is left that it is kept for.

    Args:
      folder: the run's; made if missing.
      stale_seconds: silence after which it is taken from its holder.
      beat_seconds: between two writes of the count.
      say: is given a line where this has to wait.
      silent: a holder that has been silent for that time already, as it was read.

    Raises:
      LeaseHeldError: if its holder is alive.
      OSError: if the folder can't be written.
    """
    folder = folder.absolute()
    own = _held.get(folder)
    if own is not None and not own.is_over and not own.is_lost():
        return own
    retried(lambda: folder.mkdir(parents=True, exist_ok=True), folder)
    newest = newest_lease(folder)
    if newest:
        _wait_for_silence(folder, newest, stale_seconds, say, silent)
    holder = Holder(
        hostname=socket.gethostname(),
        place=process_place(),
        pid=os.getpid(),
        began=_process_start(os.getpid()),
        since=datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        user=_user(),
    )
    unfinished, path = (
        folder / f"lease.{newest + 1}{ending}" for ending in (f".{os.getpid()}.tmp", "")
    )
    write_whole(unfinished, json.dumps(dataclasses.asdict(holder)))
    try:
        retried(lambda: os.link(unfinished, path), path)
    except FileExistsError:
        # Made by this process, if a disk has done it and reported an error.
        if read_holder(folder, newest + 1) != holder:
            raise _held_by(folder, newest + 1) from None
    finally:
        _unlink(unfinished)
    # Older ones are needed by nobody: their holders look for a higher number.
    for number in range(1, newest):
        _unlink(folder / f"lease.{number}")
    lease = _held[folder] = Lease(folder, newest + 1, holder, beat_seconds)
    atexit.register(lease.give_back)
    return lease


def use_lease(folder: Path, number: int) -> Lease:
    """Write under a lease that another process keeps alive.

    Args:
      folder: the run's.
      number: of the lease.
    """
    folder = folder.absolute()
    if folder not in _held or _held[folder].number != number:
        _held[folder] = Lease(folder, number)
    return _held[folder]


def give_up_lease(folder: Path) -> None:
    """Go on without a lease that another process has taken."""
    lease = _held.pop(folder.absolute(), None)
    if lease is not None:
        lease.give_back()


def use_lease_for(url: str, folder: Path) -> None:
    """Let a run's lease be that of its checkpoints in a bucket too."""
    _elsewhere[url] = folder.absolute()


def lease_of(path: Path | str) -> Lease | None:
    """This process's lease of the run that has a path or URL; None without one."""
    if is_url(path):
        if str(path) not in _elsewhere:
            return None
        path = _elsewhere[str(path)]
    path = Path(path).absolute()
    return next((_held[own] for own in (path, *path.parents) if own in _held), None)


def require_lease(path: Path | str) -> None:
    """Check before a commit that nobody has taken the run's folder over.

    Args:
      path: what is about to be written; a folder without a lease is nobody's.

    Raises:
      LeaseLostError: if somebody has.
    """
    lease = lease_of(path)
    if lease is not None:
        lease.require()


def is_lease(name: str) -> bool:
    """Whether a file of a run's folder belongs to leases."""
    return re.fullmatch(r"lease\.\d+(\.\d+)?(\.tmp)*", name) is not None


def newest_lease(folder: Path) -> int:
    """The highest number of a folder's leases; 0 without any."""
    matches = map(_NAME.fullmatch, names_in(folder))
    return max((int(match[1]) for match in matches if match), default=0)


def read_holder(folder: Path, number: int) -> Holder | None:
    """What a lease's file says; None if it can't be read."""
    try:
        return read_record(Holder, folder / f"lease.{number}")
    except OSError:
        return None


def _wait_for_silence(
    folder: Path,
    number: int,
    seconds: float,
    say: Callable[[str], None],
    silent: Holder | None,
) -> None:
    """Return once a lease may be taken from its holder; raise if that one lives."""
    first = read_holder(folder, number)
    if first is not None and (first.is_over or first.is_dead() or first == silent):
        return
    say(
        f"{str(folder)!r} is held by {first}; if nothing is heard of it for "
        f"{seconds:g} s, this process goes on"
    )
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(BEAT_SECONDS / 4, seconds))
        found = read_holder(folder, number)
        if found is not None and (found.is_over or found.is_dead()):
            return
        if found != first or newest_lease(folder) > number:
            raise _held_by(folder, newest_lease(folder))


def _held_by(folder: Path, number: int) -> LeaseHeldError:
    return LeaseHeldError(
        f"another process runs the run in {str(folder)!r}: "
        f"{read_holder(folder, number)} (lease {number}). Wait for its end, end it, or "
        "choose another folder (--out)"
    )


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # Nobody reads what is left.
        retried(lambda: path.unlink(missing_ok=True), path)


def process_place() -> str:
    """This start of the host and this container, where a process number is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> int | None:
    """When a process began, in ticks; 0 if it has ended, None if it can't be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # After the name, which may have spaces: the state is field 3, the start 22.
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # No name for this number, as in many containers.
        return str(os.getuid())
