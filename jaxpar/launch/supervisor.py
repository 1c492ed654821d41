"""How is a run restarted after failures: by a parent of the workers on each host.

The supervisor does not import JAX. It starts the workers, forwards signals, and watches
their heartbeats. If one fails or makes no progress, all are ended and restarted from
the newest valid checkpoint, a limited number of times per hour. What happened is in
``report.txt``.
"""

import collections
import contextlib
import dataclasses
import fcntl
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from jaxpar.launch.exit_codes import GAVE_UP, REFUSED, REPLACED, STOPPED
from jaxpar.launch.group import Group
from jaxpar.launch.lease import LeaseLostError, take_lease
from jaxpar.launch.rendezvous import (
    Attempt,
    Board,
    Member,
    Outcome,
    cause_of,
    wait_until,
)
from jaxpar.launch.report import Report
from jaxpar.launch.security import own_certificates
from jaxpar.launch.start import Launch, workers_of
from jaxpar.launch.stop_signals import STOPPING, listen
from jaxpar.launch.watchdog import Watchdog

_HOUR = 3600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def supervise(launch: Launch) -> int:
    """Run to the end, with restarts.

    Args:
      launch: what to start.

    Returns:
      The exit code: 0 when all workers have succeeded, `STOPPED` after a signal, the
      workers' own if a restart would not help, `REPLACED` if another process has taken
      the run over, `GAVE_UP` otherwise.

    Raises:
      BlockingIOError: if another process runs this run, or is this host of it.
      OSError: if the run's folder can't be written.
    """
    if launch.host == 0:
        # The head holds the run for all workers, through all restarts.
        lease = take_lease(launch.folder, stale_seconds=launch.limits.lost)
        launch = dataclasses.replace(launch, lease=lease.number)
    supervisor = _Supervisor(launch)
    try:
        with only_one(supervisor.board):
            return supervisor.run()
    except LeaseLostError as error:
        print(f"launch: {error}", file=sys.stderr)
        return REPLACED


@contextlib.contextmanager
def only_one(board: Board) -> Iterator[None]:
    """Lock the place of a host's supervisor, or report that it is taken.

    The head has the run's lease instead.
    """
    if board.me.host == 0:
        yield
        return
    path = board.folder / f"host-{board.me.host:04d}.lock"
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another launcher runs the run in {str(board.folder.parent)!r} as "
                f"host {board.me.host}: wait for its end, end it, or choose another "
                "folder (--out)"
            ) from None
        yield


class RestartBudget:
    """Restarts within an hour; pauses that double while there is no progress.

    Args:
      restarts: allowed within any hour.
    """

    def __init__(self, restarts: int):
        if restarts < 0:
            raise ValueError(f"restarts is {restarts}; it must be at least 0")
        self._restarts = restarts
        self._times: collections.deque[float] = collections.deque()
        self._pause = _FIRST_PAUSE

    def spend(self, *, progressed: bool) -> float | None:
        """Use one restart.

        Args:
          progressed: whether the run has advanced since the last one.

        Returns:
          Seconds to wait before it; None if none is left.
        """
        now = time.monotonic()
        while self._times and now - self._times[0] > _HOUR:
            self._times.popleft()
        if len(self._times) >= self._restarts:
            return None
        self._times.append(now)
        self._pause = (
            _FIRST_PAUSE if progressed else min(2 * self._pause, _LONGEST_PAUSE)
        )
        return self._pause


class _Supervisor:
    def __init__(self, launch: Launch):
        self.launch = launch
        folder = launch.folder / "launch"
        self.board = Board(folder, launch.host, launch.processes, launch.address)
        self.report = Report(launch.folder, launch.host)
        self.budget = RestartBudget(launch.restarts)
        self.asked: int | None = None
        self.is_head = launch.host == 0
        self._certificates = contextlib.ExitStack()
        before = self.board.attempt()
        self.number = 0 if before is None else before.number

    def run(self) -> int:
        """Run one attempt after the other."""
        for number in STOPPING:
            listen(number, self._notice)
        while True:
            attempt = self._next_attempt()
            if attempt.state == "over":
                self.report.over(attempt.code, attempt.why)
                return attempt.code
            self.number = attempt.number
            self.board.publish(attempt=attempt.number, running=True, outcome=None)
            with self._certificates:
                outcome = self._attend(attempt)
            self.board.publish(running=False, outcome=outcome)
            if self.is_head:
                self._decide(attempt)

    def _notice(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == signal.SIGINT:
            raise SystemExit(128 + number)  # The second signal: workers end with this.
        self.asked = number

    def _publish(self) -> None:
        """Write a sign of life."""
        asked = None if self.asked is None else signal.Signals(self.asked).name
        self.board.publish(asked=asked)

    # Between attempts

    def _next_attempt(self) -> Attempt:
        """Announce the next attempt, or wait for its announcement."""
        self._publish()
        over = self._announced_over()
        if over:
            return over
        if self.is_head:
            return self._announce()
        return self._wait_for_attempt()

    def _announced_over(self) -> Attempt | None:
        announced = self._announced()
        return announced if announced and announced.state == "over" else None

    def _announced(self) -> Attempt | None:
        """The head's last announcement, if this supervisor is one of its members."""
        found = self.board.attempt()
        me = self.board.me.id
        return found if found and found.members.get(self.launch.host) == me else None

    def _wait_for_attempt(self) -> Attempt:
        def newer() -> Attempt | None:
            found = self._announced()
            if found and (found.number > self.number or found.state == "over"):
                return found
            return None

        over = Attempt(
            number=self.number,
            state="over",
            coordinator=None,
            members={},
            processes={},
            planned=0,
        )
        ended = self._ended_certificates()
        if ended:
            return dataclasses.replace(over, code=REFUSED, why=ended)
        seconds = self.launch.limits.rendezvous
        why = (
            f"host 0 announced nothing within {seconds:g} s: is its launcher "
            f"running, with the same folder ({str(self.board.folder)!r})?"
        )
        announced = wait_until(newer, seconds, self._publish)
        return announced or dataclasses.replace(over, code=GAVE_UP, why=why)

    def _ended_certificates(self) -> str | None:
        """Renew certificates that end soon; why that can't be done, if they have."""
        if self.launch.tls is None:
            return None
        # Slow to import, and for hosts with certificates alone.
        from jaxpar.launch.certificates import keep_valid  # noqa: PLC0415

        try:
            keep_valid(self.launch.tls, self.report.say)
        except ValueError as error:
            return str(error)
        return None

    def _announce(self) -> Attempt:
        members = self._wait_for_members()
        missing = sorted(set(range(self.launch.hosts)) - {m.host for m in members})
        least = self.launch.least_hosts or self.launch.hosts
        processes = {m.host: m.processes for m in members}
        total = sum(processes.values())
        attempt = Attempt(
            number=self.number + 1,
            state="run",
            coordinator=None if total == 1 else self._coordinator(),
            members={m.host: m.id for m in members},
            processes=processes,
            planned=self.board.planned(total),
        )
        asked = [m.asked for m in members if m.asked]
        ended = self._ended_certificates()
        if ended:
            attempt = dataclasses.replace(
                attempt, state="over", code=REFUSED, why=ended
            )
        elif asked:
            why = f"{asked[0]} received while nothing ran: restart to resume"
            attempt = dataclasses.replace(attempt, state="over", code=STOPPED, why=why)
        elif len(members) < least:
            why = (
                f"{len(members)} of {self.launch.hosts} hosts appeared within "
                f"{self.launch.limits.rendezvous:g} s; missing: "
                f"{', '.join(f'host {host}' for host in missing)}. Start their "
                f"launchers with the same folder ({str(self.board.folder)!r})"
            )
            attempt = dataclasses.replace(attempt, state="over", code=GAVE_UP, why=why)
        elif attempt.coordinator is not None and self.launch.own_tls:
            made = own_certificates(self.launch.address, self.report.say)
            own = self._certificates.enter_context(made)
            attempt = dataclasses.replace(attempt, tls=own)
        self.board.announce(attempt)
        return attempt

    def _wait_for_members(self) -> list[Member]:
        """The members that are alive and idle: all, or those present at the timeout."""

        def idle() -> list[Member]:
            found = [self.board.member(host) for host in range(self.launch.hosts)]
            return [
                m
                for m in found
                if m is not None
                and not m.running
                and (m.host == 0 or self._is_alive(m))
            ]

        def all_idle() -> list[Member] | None:
            found = idle()
            is_whole = len(found) == self.launch.hosts
            return found if is_whole or any(m.asked for m in found) else None

        seconds = self.launch.limits.rendezvous
        return wait_until(all_idle, seconds, self._publish) or idle()

    def _is_alive(self, member: Member) -> bool:
        lost = self.launch.limits.lost
        return self.board.silent_seconds(member, unseen=lost) < lost

    def _coordinator(self) -> str:
        address = self.launch.address
        port = self.launch.port or free_port(address)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    # During an attempt

    def _attend(self, attempt: Attempt) -> Outcome:
        """Start the workers and watch them until they have ended."""
        group = Group(workers_of(self.launch, attempt), self.launch.command)
        watch = Watchdog(
            group, self.board, attempt, self.launch.limits, lambda: self.asked
        )
        with self.report.following(group.workers[0].log):
            kind, code, why = watch.to_the_end()
        return Outcome(kind, code, why, group.ends())

    # After an attempt

    def _decide(self, attempt: Attempt) -> None:
        """End the attempt on all hosts; announce whether another follows."""
        mine = self.board.me.outcome
        assert mine is not None, "set by run"
        if mine.kind != "done":
            ended = dataclasses.replace(attempt, state="ended", why=mine.why)
            self.board.announce(ended)
        outcomes = self._outcomes(attempt)
        cause = cause_of(outcomes)
        self.report.attempt(attempt, outcomes)
        code: int | None = {"done": 0, "stopped": STOPPED, "refused": cause.code}.get(
            cause.kind
        )
        why = cause.why
        if code is None:
            steps = [end.step for each in outcomes.values() for end in each.workers]
            went_on = [
                end.resumed for each in outcomes.values() for end in each.workers
            ]
            pause = self.budget.spend(progressed=_moved(steps, went_on))
            if pause is None:
                code = GAVE_UP
                why = (
                    f"{why}; all {self.launch.restarts} restarts of this hour are used"
                )
            elif self.asked is None:
                self.report.say(f"{why}: restarting in {pause:g} s")
                wait_until(lambda: self.asked, pause, self._publish)
        if code is not None:
            over = dataclasses.replace(attempt, state="over", code=code, why=why)
            self.board.announce(over)

    def _outcomes(self, attempt: Attempt) -> dict[int, Outcome]:
        """Every host's outcome, once its supervisor has ended its workers."""

        def outcome(host: int) -> Outcome | None:
            member = self.board.member(host)
            if member is None or member.id != attempt.members[host]:
                return gone
            if member.attempt == attempt.number and not member.running:
                return member.outcome
            return None if self._is_alive(member) else gone

        gone = Outcome("failed", 1, "its supervisor does not answer", [])
        wait_until(
            lambda: all(outcome(host) for host in attempt.members),
            self.launch.limits.save,
            self.board.publish,
        )
        return {host: outcome(host) or gone for host in attempt.members}


def free_port(address: str) -> int:
    """A port of an address that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((address, 0))
        return free.getsockname()[1]


def _moved(steps: Sequence[int | None], resumed: Sequence[int | None]) -> bool:
    """Whether an attempt advanced beyond its start."""
    last = max((step for step in steps if step is not None), default=0)
    return last > max((step for step in resumed if step is not None), default=0)
