"""How do hosts agree: on when to start, with which hosts, and when the run is over?

Every host's supervisor writes one small file in the run's shared folder (checkpoints
need that folder too), and increments a count in it as long as it lives. The first
host's supervisor, the head, announces each attempt in another file. Hosts need no
common clock: a supervisor is alive while others see its count change.
"""

import dataclasses
import json
import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxpar.launch.lease import require_lease
from jaxpar.launch.own_files import attempted, retried, write_whole
from jaxpar.launch.typed_json import read_record

Kind = Literal["done", "stopped", "saved", "refused", "failed", "stalled", "ended"]
"""How an attempt ended on a host, in order: all done; a signal to the launcher; a
signal to somebody else, saved too; an error that a retry can't fix; a failure here; a
worker without progress; because of another host."""


@dataclasses.dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended.

    Attributes:
      index: of the worker.
      code: its exit code; minus the number for a signal; None if we ended it.
      at: what it was doing.
      resumed: the step that it resumed from.
      step: the last step that it did.
      error: its error message, in one line.
      tail: the last lines of its log.
      stacks: lines of its stacks; empty if it was not asked for them.
    """

    index: int
    code: int | None
    at: str
    resumed: int | None
    step: int | None
    error: str | None
    tail: list[str]
    stacks: list[str]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended on one host.

    Attributes:
      kind: see `Kind`.
      code: exit code of the run for this outcome.
      why: the reason, as text.
      workers: those of this host.
    """

    kind: Kind
    code: int
    why: str
    workers: list[WorkerEnd]


@dataclasses.dataclass(frozen=True)
class Member:
    """A host's supervisor, as in its file.

    Attributes:
      host: its number, from 0.
      id: made at its start; differs between supervisors of the same host.
      count: of its writes.
      hostname: the host's own name.
      address: where its workers listen.
      processes: workers that it will start.
      attempt: the last one that it took part in; 0 for none.
      running: whether that attempt still runs.
      outcome: of that attempt, once it has ended.
      asked: the signal that requests an end; None for none.
    """

    host: int
    id: str
    count: int
    hostname: str
    address: str
    processes: int
    attempt: int = 0
    running: bool = False
    outcome: Outcome | None = None
    asked: str | None = None


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The head's announcement.

    Attributes:
      number: from 1, over all launches of the run.
      state: "run"; "ended" once a host has failed; "over" if no other attempt follows.
      coordinator: where worker 0 will listen; None for a single worker.
      members: host -> id of the supervisors that take part.
      processes: host -> workers on it.
      planned: workers of the whole run at its first launch.
      code: of the run, when it is over.
      why: the reason, as text.
      tls: folder of certificates that the head made, for workers of its own host alone;
        None for none.
    """

    number: int
    state: Literal["run", "ended", "over"]
    coordinator: str | None
    members: dict[int, str]
    processes: dict[int, int]
    planned: int
    code: int = 0
    why: str = ""
    tls: str | None = None

    def first_worker(self, host: int) -> int:
        """The index of a host's first worker."""
        return sum(n for other, n in self.processes.items() if other < host)


@dataclasses.dataclass(frozen=True)
class _Plan:
    processes: int


class Board:
    """The files through which supervisors coordinate.

    Args:
      folder: of the launch; made if missing, for this user alone.
      host: the number of this host.
      processes: workers that it will start.
      address: where they listen.
    """

    def __init__(self, folder: Path, host: int, processes: int, address: str):
        self.folder = folder
        retried(lambda: folder.mkdir(0o700, parents=True, exist_ok=True), folder)
        self.me = Member(
            host=host,
            id=secrets.token_hex(8),
            count=0,
            hostname=socket.gethostname(),
            address=address,
            processes=processes,
        )
        self._seen: dict[int, tuple[str, int, float, bool]] = {}

    def publish(self, **changes: Any) -> None:
        """Write this host's file, with changes; this is also its sign of life."""
        self.me = dataclasses.replace(self.me, count=self.me.count + 1, **changes)
        path, content = self._member_file(self.me.host), dataclasses.asdict(self.me)
        # The next one, a moment later, says the same.
        attempted(lambda: _write(path, content), path)

    def member(self, host: int) -> Member | None:
        """Read the file of a host's supervisor."""
        return read_record(Member, self._member_file(host))

    def silent_seconds(self, member: Member, *, unseen: float = 0.0) -> float:
        """Seconds since a member's count last changed.

        Args:
          member: as it was just read.
          unseen: seconds to add while it was never seen to change: its file may be
            left from a supervisor that ended long ago.
        """
        now = time.monotonic()
        before = self._seen.get(member.host)
        if before is None or before[0] != member.id:
            seen = (member.id, member.count, now, False)
        elif before[1] != member.count:
            seen = (member.id, member.count, now, True)
        else:
            seen = before
        self._seen[member.host] = seen
        return now - seen[2] + (0.0 if seen[3] else unseen)

    def attempt(self) -> Attempt | None:
        """Read the head's last announcement."""
        return read_record(Attempt, self.folder / "attempt.json")

    def announce(self, attempt: Attempt) -> None:
        """Announce an attempt to all hosts; called by the head."""
        _write(self.folder / "attempt.json", dataclasses.asdict(attempt))

    def planned(self, processes: int) -> int:
        """The number of workers at the run's first launch; called by the head."""
        path = self.folder / "plan.json"
        plan = read_record(_Plan, path)
        if plan is None:
            plan = _Plan(processes)
            _write(path, dataclasses.asdict(plan))
        return plan.processes

    def _member_file(self, host: int) -> Path:
        return self.folder / f"host-{host:04d}.json"


def wait_until(
    done: Callable[[], Any], seconds: float, meanwhile: Callable[[], None]
) -> Any:
    """Poll until there is a result; None after a timeout.

    Args:
      done: polled; None for not yet.
      seconds: timeout; 0 for no limit.
      meanwhile: called between polls.
    """
    until = time.monotonic() + (seconds or math.inf)
    while time.monotonic() < until:
        found = done()
        if found:
            return found
        meanwhile()
        time.sleep(POLL_SECONDS)
    return None


POLL_SECONDS = 0.1

_DECIDES: Sequence[Kind] = (
    "refused",
    "stalled",
    "failed",
    "stopped",
    "saved",
    "ended",
    "done",
)


def cause_of(outcomes: Mapping[int, Outcome]) -> Outcome:
    """The outcome that decides: a final one, then one that failed by itself.

    Args:
      outcomes: of an attempt, by host.
    """
    return min(outcomes.values(), key=lambda each: _DECIDES.index(each.kind))


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically."""
    require_lease(path)
    write_whole(path, json.dumps(content))
