"""What do supervisors say to each other: who they are, what runs, and how it ended?

`jaxpar.launch.board` has how it is said.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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

    def without_texts(self) -> "Member":
        """What may be sent: connections are not encrypted."""
        if self.outcome is None:
            return self
        ends = [
            dataclasses.replace(end, at="", error=None, tail=[], stacks=[])
            for end in self.outcome.workers
        ]
        outcome = dataclasses.replace(self.outcome, why="", workers=ends)
        return dataclasses.replace(self, outcome=outcome)


STATES = ("run", "ended", "over")


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
      head: the host that has announced it; its workers are the first.
      lease: by which that host leads; 0 for none.
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
    head: int = 0
    lease: int = 0
    code: int = 0
    why: str = ""
    tls: str | None = None

    def first_worker(self, host: int) -> int:
        """The index of a host's first worker."""
        return sum(
            number
            for other, number in self.processes.items()
            if (other != self.head, other) < (host != self.head, host)
        )

    def without_texts(self) -> "Attempt":
        """What may be sent: connections are not encrypted."""
        return dataclasses.replace(self, why="")

    def is_after(self, other: "Attempt | None") -> bool:
        """Whether it was announced later than another."""
        return other is None or self._order() > other._order()

    def _order(self) -> tuple[int, int, int]:
        return self.lease, self.number, STATES.index(self.state)


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
