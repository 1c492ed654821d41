"""What does the supervisor that leads decide: what runs, and whether it runs again?"""

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence, Set

from jaxpar.launch.board import Board
from jaxpar.launch.certificate_watch import ended_certificates
from jaxpar.launch.exit_codes import GAVE_UP, REFUSED, STOPPED
from jaxpar.launch.leader import write_left_out
from jaxpar.launch.rendezvous import Attempt, Member, Outcome, cause_of, wait_until
from jaxpar.launch.report import Report
from jaxpar.launch.restarts import GONE, LAST_FAILURE, HostFailures, RestartBudget
from jaxpar.launch.security import own_certificates
from jaxpar.launch.start import Launch


class RunHead:
    """Leads the hosts of a run, by its lease.

    Args:
      launch: with the lease's number.
      board: of this host.
      report: of the run.
      asked: returns the signal that requests an end, once there is one.
      publish: gives a sign of life, and hears the others.
      left_out: the hosts that a leader of before has left out.
    """

    def __init__(
        self,
        launch: Launch,
        board: Board,
        report: Report,
        asked: Callable[[], int | None],
        publish: Callable[[], None],
        left_out: Set[int] = frozenset(),
    ):
        self.launch, self.board, self.report = launch, board, report
        self.budget = RestartBudget(launch.restarts)
        self.failures, self.left_out = HostFailures(), set(left_out)
        self.certificates = contextlib.ExitStack()
        self._asked, self._publish = asked, publish
        assert launch.lease is not None, "who leads has it"
        board.lead(launch.lease)
        report.is_head = True

    def announce(self, number: int) -> Attempt:
        """Announce the next attempt, or the end, once the hosts are there.

        Args:
          number: of the attempt.
        """
        members = self._wait_for_members()
        missing = sorted(self._wanted() - {m.host for m in members})
        least = self.launch.least_hosts or self.launch.hosts
        processes = {m.host: m.processes for m in members}
        total = sum(processes.values())
        attempt = Attempt(
            number=number,
            state="run",
            coordinator=None if total == 1 else self._coordinator(),
            members={m.host: m.id for m in members},
            processes=processes,
            planned=self.board.planned(total),
            head=self.launch.host,
            lease=self.launch.lease or 0,
        )
        asked = [m.asked for m in members if m.asked]
        ended = ended_certificates(self.launch.tls, self.report.warn)
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
            own = self.certificates.enter_context(made)
            attempt = dataclasses.replace(attempt, tls=own)
        self.board.announce(attempt)
        return attempt

    def _wait_for_members(self) -> list[Member]:
        """The members that are alive and idle: all, or those present at the timeout."""

        def idle() -> list[Member]:
            found = [self.board.member(host) for host in sorted(self._wanted())]
            return [
                m
                for m in found
                if m is not None
                and not m.running
                and (m.host == self.launch.host or self._is_alive(m))
            ]

        def all_idle() -> list[Member] | None:
            found = idle()
            is_whole = len(found) == len(self._wanted())
            return found if is_whole or any(m.asked for m in found) else None

        seconds = self.launch.limits.rendezvous
        return wait_until(all_idle, seconds, self._publish) or idle()

    def _wanted(self) -> set[int]:
        return set(range(self.launch.hosts)) - self.left_out

    def _is_alive(self, member: Member) -> bool:
        lost = self.launch.limits.lost
        return self.board.silent_seconds(member, unseen=lost) < lost

    def _coordinator(self) -> str:
        address = self.launch.address
        port = self.launch.port or free_port(address)
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def decide(self, attempt: Attempt) -> None:
        """End the attempt on all hosts; announce whether another follows."""
        mine = self.board.me.outcome
        assert mine is not None, "set by run"
        is_told = self.board.attempt() != attempt
        if mine.kind != "done" and not is_told:
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
            code, why = self._restart(outcomes, why)
        if code is not None:
            over = dataclasses.replace(attempt, state="over", code=code, why=why)
            self.board.announce(over)

    def _restart(
        self, outcomes: Mapping[int, Outcome], why: str
    ) -> tuple[int | None, str]:
        """Wait for the next attempt; the run's code and the reason if none follows."""
        ends = [end for each in outcomes.values() for end in each.workers]
        steps, resumed = [end.step for end in ends], [end.resumed for end in ends]
        pause = self.budget.spend(
            progressed=_moved(steps, resumed), resumed=_last(resumed)
        )
        refused = self._leave_out(outcomes)
        if refused:
            return GAVE_UP, f"{why}; {refused}"
        if pause is None:
            used = f"all {self.launch.restarts} restarts of this hour are used"
            return GAVE_UP, f"{why}; {used}"
        if self._asked() is None:
            self.report.say(f"{why}: restarting in {pause:g} s")
            wait_until(self._asked, pause, self._publish)
        return None, why

    def _leave_out(self, outcomes: Mapping[int, Outcome]) -> str | None:
        """Leave hosts out that fail too often; why the run can't go on, if it can't."""
        often = set(self.failures.count(outcomes)) - self.left_out
        if not often:
            return None
        named = ", ".join(f"host {host}" for host in sorted(often))
        said = f"{named} failed {LAST_FAILURE} times"
        left, least = len(self._wanted() - often), self.launch.least_hosts
        if least is None:
            if self.launch.hosts > 1:
                self.report.say(f"{said}: --least-hosts lets a run go on without it")
            return None
        if left < least:
            return (
                f"{said}, and {left} of {self.launch.hosts} hosts remain without it, "
                f"fewer than --least-hosts {least}: replace it, and start again"
            )
        self.left_out |= often
        write_left_out(self.board.folder, self.left_out)
        self.report.say(f"{said} and is left out: the run goes on with {left} hosts")
        return None

    def _outcomes(self, attempt: Attempt) -> dict[int, Outcome]:
        """Every host's outcome, once its supervisor has ended its workers."""

        def outcome(host: int) -> Outcome | None:
            member = self.board.member(host)
            if member is None or member.id != attempt.members[host]:
                return GONE
            if member.attempt == attempt.number and not member.running:
                return member.outcome
            silence = self.board.silent_seconds(member)
            return None if silence < self.launch.limits.lost else GONE

        def whole(host: int) -> Outcome:
            """With the texts, which only its file has."""
            found, sent = self.board.whole_member(host), outcome(host) or GONE
            is_it = found is not None and found.id == attempt.members[host]
            return (found.outcome or sent) if found and is_it and sent != GONE else sent

        wait_until(
            lambda: all(outcome(host) for host in attempt.members),
            self.launch.limits.save,
            self.board.publish,
        )
        return {host: whole(host) for host in attempt.members}


def free_port(address: str) -> int:
    """A port of an address that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((address, 0))
        return free.getsockname()[1]


def _moved(steps: Sequence[int | None], resumed: Sequence[int | None]) -> bool:
    """Whether an attempt advanced beyond its start."""
    return _last(steps) > _last(resumed)


def _last(steps: Sequence[int | None]) -> int:
    return max((step for step in steps if step is not None), default=0)
