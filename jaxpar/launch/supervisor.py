"""How is a run restarted after failures: by a parent of the workers on each host.

The supervisor does not import JAX. It starts the workers, forwards signals, and watches
their heartbeats. If one fails or makes no progress, all are ended and restarted from
the newest valid checkpoint, a limited number of times per hour. What happened is in
``report.txt``.
"""

import contextlib
import dataclasses
import fcntl
import signal
import sys
import time
from collections.abc import Iterator, Set
from types import FrameType

from jaxpar.launch.board import Board
from jaxpar.launch.certificate_watch import CertificateWatch, ended_certificates
from jaxpar.launch.exit_codes import GAVE_UP, REFUSED, REPLACED
from jaxpar.launch.group import Group
from jaxpar.launch.head import RunHead
from jaxpar.launch.leader import is_led_elsewhere, read_left_out
from jaxpar.launch.lease import (
    LeaseHeldError,
    LeaseLostError,
    give_up_lease,
    take_lease,
)
from jaxpar.launch.rendezvous import (
    POLL_SECONDS,
    Attempt,
    Outcome,
    wait_until,
)
from jaxpar.launch.report import Report
from jaxpar.launch.start import Launch, workers_of
from jaxpar.launch.stop_signals import STOPPING, listen
from jaxpar.launch.watchdog import Watchdog

_NAMED_SECONDS = 10.0
"""Time for who has taken the lease to name itself."""


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
    lease = _first_lease(launch)
    supervisor = _Supervisor(launch)
    try:
        with only_one(supervisor.board, is_head=lease is not None):
            if lease is not None:
                supervisor.lead(lease)
            return supervisor.run()
    except LeaseLostError as error:
        print(f"launch: {error}", file=sys.stderr)
        return REPLACED
    finally:
        supervisor.board.close()


def _first_lease(launch: Launch) -> int | None:
    """Host 0 leads first; it follows if another host of this launch leads by now."""
    if launch.host != 0:
        return None
    try:
        return take_lease(launch.folder, stale_seconds=launch.limits.lost).number
    except LeaseHeldError:
        if launch.hosts > 1 and is_led_elsewhere(launch.folder / "launch", launch.host):
            return None
        raise


@contextlib.contextmanager
def only_one(board: Board, *, is_head: bool = False) -> Iterator[None]:
    """Lock the place of a host's supervisor, or report that it is taken.

    Args:
      board: of the host.
      is_head: whether it has the run's lease, which a process that hangs with the lock
        can lose.
    """
    path = board.folder / f"host-{board.me.host:04d}.lock"
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_head:
                raise BlockingIOError(
                    f"another launcher runs the run in {str(board.folder.parent)!r} as "
                    f"host {board.me.host}: wait for its end, end it, or choose "
                    "another folder (--out)"
                ) from None
        yield


class _Supervisor:
    def __init__(self, launch: Launch):
        self.launch = launch
        self.board = Board(
            launch.folder / "launch",
            launch.host,
            launch.processes,
            launch.address,
            hosts=launch.hosts,
            lost=launch.limits.lost,
        )
        self.report = Report(launch.folder, launch.host)
        self.report.is_head = False
        self.asked: int | None = None
        self.head: RunHead | None = None
        before = self.board.attempt()
        self.number = 0 if before is None else before.number
        self._attended: Attempt | None = None

    def lead(self, lease: int, left_out: Set[int] = frozenset()) -> None:
        """Lead the hosts from now on, by a lease of the run."""
        self.launch = dataclasses.replace(self.launch, lease=lease)
        self.head = RunHead(
            self.launch,
            self.board,
            self.report,
            lambda: self.asked,
            self._publish,
            left_out,
        )
        last = self.board.attempt()
        self.number = max(self.number, 0 if last is None else last.number)

    def run(self) -> int:
        """Run one attempt after the other."""
        for number in STOPPING:
            listen(number, self._notice)
        while True:
            try:
                code = self._run_one()
            except LeaseLostError:
                if not self._follows():
                    raise
                continue
            if code is not None:
                return code

    def _run_one(self) -> int | None:
        """Run an attempt; the run's code if none follows."""
        attempt = self._next_attempt()
        if attempt is None:
            return None
        if attempt.state == "over":
            self.report.over(attempt.code, attempt.why)
            return attempt.code
        self.number, self._attended = attempt.number, attempt
        self.board.publish(attempt=attempt.number, running=True, outcome=None)
        with contextlib.nullcontext() if self.head is None else self.head.certificates:
            outcome = self._attend(attempt)
        self.board.publish(running=False, outcome=outcome)
        if self.head is not None:
            self.head.decide(attempt)
        if self.head is not None and self.launch.host in self.head.left_out:
            return self._step_aside()
        return None

    def _step_aside(self) -> int:
        """Give the lead to another host: this one is left out."""
        why = "another host leads now, as this one is left out"
        print(f"launch: {why}", file=sys.stderr, flush=True)
        give_up_lease(self.launch.folder)
        return GAVE_UP

    def _follows(self) -> bool:
        """Follow the host that has taken the lead; whether there is one."""
        folder, host = self.board.folder, self.launch.host
        if self.launch.hosts == 1 or not wait_until(
            lambda: is_led_elsewhere(folder, host), _NAMED_SECONDS, lambda: None
        ):
            return False
        give_up_lease(self.launch.folder)
        self.launch = dataclasses.replace(self.launch, lease=None)
        self.head, self.report.is_head = None, False
        self.board.follow()
        why = "another host leads now"
        self.board.publish(running=False, outcome=Outcome("ended", 0, why, []))
        return True

    def _notice(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == signal.SIGINT:
            raise SystemExit(128 + number)  # The second signal: workers end with this.
        self.asked = number

    def _publish(self) -> None:
        """Write a sign of life."""
        asked = None if self.asked is None else signal.Signals(self.asked).name
        self.board.publish(asked=asked)

    # Between attempts

    def _next_attempt(self) -> Attempt | None:
        """Announce the next attempt, or wait for its announcement.

        Returns:
          The attempt; None if this host has begun to lead meanwhile.
        """
        self._publish()
        over = self._announced_over()
        if over:
            return over
        if self.head is not None:
            return self.head.announce(self.number + 1)
        return self._wait_for_attempt()

    def _announced_over(self) -> Attempt | None:
        announced = self._announced()
        return announced if announced and announced.state == "over" else None

    def _announced(self) -> Attempt | None:
        """The leader's last announcement, if it is for this supervisor."""
        found, leader = self.board.attempt(), self.board.leader
        if found is None:
            return None
        # The end is for those too that were left out.
        ends = found.state == "over" and leader and leader.lease == found.lease
        is_member = found.members.get(self.launch.host) == self.board.me.id
        return found if is_member or ends else None

    def _wait_for_attempt(self) -> Attempt | None:
        def newer() -> Attempt | bool:
            found = self._announced()
            if found and (found.number > self.number or found.state == "over"):
                return found
            # A leader that is alive, with a group that this host is not in.
            is_led = self.board.silence_of_leader() < self.launch.limits.lost
            return self._takes_over() or is_led

        ended = ended_certificates(self.launch.tls, self.report.warn)
        if ended:
            return self._over(REFUSED, ended)
        seconds = self.launch.limits.rendezvous
        while True:
            found = wait_until(newer, seconds, self._publish)
            if isinstance(found, Attempt):
                return found
            if self.head is not None:
                return None
            if not found:
                host = self.board.leader.host if self.board.leader else 0
                why = (
                    f"host {host}, which leads, announced nothing within {seconds:g} "
                    "s: is its launcher running, with the same folder "
                    f"({str(self.board.folder)!r})?"
                )
                return self._over(GAVE_UP, why)
            self._publish()
            time.sleep(POLL_SECONDS)

    def _over(self, code: int, why: str) -> Attempt:
        """The end, as this host sees it."""
        return Attempt(
            number=self.number,
            state="over",
            coordinator=None,
            members={},
            processes={},
            planned=0,
            code=code,
            why=why,
        )

    def _takes_over(self) -> bool:
        """Take the place of a leader that is lost, if it is this host's turn."""
        if not self.board.may_lead():
            return False
        try:
            lease = take_lease(
                self.launch.folder,
                stale_seconds=self.launch.limits.lost,
                silent=self.board.succession.holder,
            )
        except LeaseHeldError:  # By another host, a moment before.
            return False
        before = self.board.leader
        self.lead(lease.number, read_left_out(self.board.folder))
        self.report.say(
            f"the supervisor of host {before.host if before else 0} is lost: host "
            f"{self.launch.host} leads now"
        )
        last, own = self.board.attempt(), self._attended
        if last and own and last.number == own.number and last.state == "run":
            assert self.head is not None
            self.head.decide(own)
        return True

    # During an attempt

    def _attend(self, attempt: Attempt) -> Outcome:
        """Start the workers and watch them until they have ended."""
        group = Group(workers_of(self.launch, attempt), self.launch.command)
        certificates = CertificateWatch(self.launch.tls, self.report.warn)
        watch = Watchdog(
            group,
            self.board,
            attempt,
            self.launch.limits,
            lambda: self.asked,
            certificates.look,
        )
        try:
            with self.report.following(group.workers[0].log):
                kind, code, why = watch.to_the_end()
        except LeaseLostError:
            group.end()
            raise
        return Outcome(kind, code, why, group.ends())
