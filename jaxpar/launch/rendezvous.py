"""How do the hosts of a run agree: on when to start, with whom, and that it is over?

Every host's supervisor writes one small file in the run's folder, which all hosts see
(checkpoints need that too), and counts in it as long as it lives. The first host's
supervisor, the head, announces each attempt in another. Nothing here needs a clock that
hosts share: a supervisor is alive while others see its count change.
"""

import dataclasses
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal["done", "stopped", "saved", "refused", "failed", "stalled", "ended"]
"""How an attempt went on a host: to its end; at a signal to its launcher; at a signal
to somebody else, saved too; not to be tried again; by a failure here; by a worker that
made no progress; because of another host."""


@dataclasses.dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended.

    Attributes:
      index: of the worker.
      code: its exit code; minus the signal's number if by one; None if by us.
      at: what it was at.
      resumed: the step that it had gone on from.
      step: the last step that it did.
      error: what it said of it, in a line.
      tail: the last lines of its log.
      stacks: lines of its stacks; none if it was not asked for them.
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
    """How an attempt went on one host.

    Attributes:
      kind: see `Kind`.
      code: that the run would end with by this.
      why: in words.
      workers: of this host.
    """

    kind: Kind
    code: int
    why: str
    workers: list[WorkerEnd]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Outcome":
        """Of what `dataclasses.asdict` gave."""
        ends = [WorkerEnd(**each) for each in content["workers"]]
        return cls(**{**content, "workers": ends})


@dataclasses.dataclass(frozen=True)
class Member:
    """A host's supervisor, as it last wrote itself down.

    Attributes:
      host: its number, from 0.
      id: made at its start; another supervisor of the same host has another.
      count: of its writes.
      hostname: what the host calls itself.
      address: where its workers listen.
      processes: that it will start.
      attempt: the last that it took part in; 0 for none.
      running: whether it still does.
      outcome: of that attempt, once it has ended.
      asked: the signal that asks for an end, once one has come; None for none.
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
    """What the head announces.

    Attributes:
      number: from 1 on, over all launches of the run.
      state: "run"; "ended" once a host has failed; "over" when none follows.
      coordinator: where worker 0 will listen; None for a worker that is alone.
      members: host -> id of the supervisors that take part.
      processes: host -> workers on it.
      planned: workers of the whole run at its first launch.
      code: of the run, when it is over.
      why: in words.
    """

    number: int
    state: Literal["run", "ended", "over"]
    coordinator: str | None
    members: dict[int, str]
    processes: dict[int, int]
    planned: int
    code: int = 0
    why: str = ""

    def first_worker(self, host: int) -> int:
        """The index of a host's first worker."""
        return sum(n for other, n in self.processes.items() if other < host)


class Board:
    """The files by which supervisors know of each other.

    Args:
      folder: of the launch; made if missing, for this user alone.
      host: whose this is.
      processes: that it will start.
      address: where they listen.
    """

    def __init__(self, folder: Path, host: int, processes: int, address: str):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.me = Member(
            host=host,
            id=secrets.token_hex(8),
            count=0,
            hostname=socket.gethostname(),
            address=address,
            processes=processes,
        )
        self._seen: dict[int, tuple[str, int, float, bool]] = {}

    def tell(self, **changes: Any) -> None:
        """Write this host down, with changes; this is also its sign of life."""
        self.me = dataclasses.replace(self.me, count=self.me.count + 1, **changes)
        _write(self._member_file(self.me.host), dataclasses.asdict(self.me))

    def member(self, host: int) -> Member | None:
        """Read what a host's supervisor wrote last."""
        content = _read(self._member_file(host))
        if content is None:
            return None
        if content["outcome"]:
            content["outcome"] = Outcome.from_json(content["outcome"])
        return Member(**content)

    def silent_seconds(self, member: Member, *, unheard: float = 0.0) -> float:
        """For how long a member's count has not been seen to change.

        Args:
          member: as it was just read.
          unheard: what to add while it was never seen to change: its file may be of a
            supervisor that is long gone.
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
        return now - seen[2] + (0.0 if seen[3] else unheard)

    def attempt(self) -> Attempt | None:
        """Read what the head announced last."""
        content = _read(self.folder / "attempt.json")
        if content is None:
            return None
        for field in ("members", "processes"):
            content[field] = {int(host): x for host, x in content[field].items()}
        return Attempt(**content)

    def announce(self, attempt: Attempt) -> None:
        """Tell all hosts; the head does."""
        _write(self.folder / "attempt.json", dataclasses.asdict(attempt))

    def planned(self, processes: int) -> int:
        """How many workers the run was first launched with; the head asks."""
        path = self.folder / "plan.json"
        content = _read(path)
        if content is None:
            content = {"processes": processes}
            _write(path, content)
        return content["processes"]

    def _member_file(self, host: int) -> Path:
        return self.folder / f"host-{host:04d}.json"


def wait_until(
    done: Callable[[], Any], seconds: float, meanwhile: Callable[[], None]
) -> Any:
    """Ask again and again until something true comes; None when the time is over.

    Args:
      done: asked.
      seconds: 0 for no limit.
      meanwhile: called between.
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
    """The outcome that decides: what is final, then what failed by itself.

    Args:
      outcomes: of an attempt, by host.
    """
    return min(outcomes.values(), key=lambda each: _DECIDES.index(each.kind))


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file in one move."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    os.replace(unfinished, path)


def _read(path: Path) -> dict[str, Any] | None:
    """Read a file that others replace; None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
