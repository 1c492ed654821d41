"""How does an attempt go on this host, and when is it over?

The watchdog judges by its workers' exit codes, by their phases and how long these last,
and by what the other hosts say.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence

from jaxpar.launch.board import Board
from jaxpar.launch.exit_codes import FINAL, STOPPED
from jaxpar.launch.group import Group
from jaxpar.launch.limits import Limits
from jaxpar.launch.rendezvous import POLL_SECONDS, Attempt, Kind, wait_until
from jaxpar.launch.worker_environment import read_error

_GRACE_SECONDS = 2.0
"""Time for workers to report what ended them, after the first has ended."""
_SAVING_SECONDS = 600.0
"""Time for workers to save and end after a signal, at most."""


class Watchdog:
    """Watches one attempt on one host.

    Args:
      group: its workers.
      board: what the hosts say.
      attempt: the attempt.
      limits: of each phase.
      asked: returns the signal that requests an end, once there is one.
      meanwhile: is called while the workers run, a few times a second.
    """

    def __init__(
        self,
        group: Group,
        board: Board,
        attempt: Attempt,
        limits: Limits,
        asked: Callable[[], int | None],
        meanwhile: Callable[[], None] = lambda: None,
    ):
        self._group, self._board, self._attempt = group, board, attempt
        self._limits, self._asked = limits, asked
        self._meanwhile = meanwhile
        self._passed_on: tuple[int, float] | None = None

    def to_the_end(self) -> tuple[Kind, int, str]:
        """Return when no worker is left: the kind of end, a code, and the reason."""
        while True:
            self._board.publish()
            self._meanwhile()
            self._pass_on()
            found = self._own_end() or self._stall() or self._end_elsewhere()
            if found:
                self._group.end()
                return found
            time.sleep(POLL_SECONDS)

    def _pass_on(self) -> None:
        """Forward a signal, once; workers save and end."""
        asked = self._asked()
        if asked is not None and self._passed_on is None:
            self._passed_on = (asked, time.monotonic())
            self._group.send(signal.SIGTERM)

    def _own_end(self) -> tuple[Kind, int, str] | None:
        """Judge by the exit codes."""
        codes = self._group.codes()
        if all(code == 0 for code in codes):
            return "done", 0, "all workers have ended well"
        if not any(codes):
            return None
        saves = STOPPED in codes
        seconds = self._limits.save if saves else _GRACE_SECONDS
        wait_until(
            lambda: None not in self._group.codes(), seconds, self._board.publish
        )
        return self._judged(self._group.codes())

    def _judged(self, codes: Sequence[int | None]) -> tuple[Kind, int, str]:
        bad = [(i, code) for i, code in enumerate(codes) if code]
        final = [(i, code) for i, code in bad if code in FINAL]
        if final:
            i, code = final[0]
            error = read_error(self._group.workers[i])
            return "refused", code, error or self._said(i, code)
        ends_so = (STOPPED, -signal.SIGTERM)  # The latter before a run has begun.
        if self._passed_on is not None and all(code in ends_so for _, code in bad):
            name = signal.Signals(self._passed_on[0]).name
            return "stopped", STOPPED, f"{name} received: restart to resume"
        if all(code == STOPPED for _, code in bad):
            return "saved", STOPPED, f"{self._name(bad[0][0])} was asked to end"
        # A killed worker is reported before those that failed because of it.
        killed = [each for each in bad if each[1] < 0 and each[1] != -signal.SIGABRT]
        others = [each for each in bad if each[1] != STOPPED]
        i, code = (killed or others)[0]
        return "failed", 1, self._said(i, code)

    def _said(self, place: int, code: int) -> str:
        ended = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with code {code}"
        )
        error = read_error(self._group.workers[place])
        return f"{self._name(place)} {ended}{f': {error}' if error else ''}"

    def _stall(self) -> tuple[Kind, int, str] | None:
        """Find a worker that exceeds the limit of its phase."""
        now = time.monotonic()
        late = self._limits.late(self._group.beats(), now)
        if self._passed_on and now - self._passed_on[1] > _SAVING_SECONDS:
            late = [(0, f"did not save and end within {_SAVING_SECONDS:g} s")]
        if not late:
            return None
        # A stopped worker blocks the others, which then exceed their limits too.
        stopped = self._group.stopped()
        place, why = next((each for each in late if each[0] in stopped), late[0])
        self._group.dump_stacks()
        said = f"{self._name(place)} {why}"
        if place in stopped:
            said += " (the process was stopped)"
        elif stopped:
            said = f"{self._name(min(stopped))} was stopped by a signal: {said}"
        return "stalled", 1, said

    def _name(self, place: int) -> str:
        index = self._group.workers[place].index
        return f"worker {index} ({self._board.me.hostname})"

    def _end_elsewhere(self) -> tuple[Kind, int, str] | None:
        """Check the other hosts: the leader all of them, the others the leader."""
        announced = self._board.attempt()
        assert announced is not None, "announced before"
        if announced.number != self._attempt.number or announced.state != "run":
            self._group.dump_stacks()
            head = f"host {announced.head}, which leads, ended the attempt"
            return "ended", 0, announced.why or head
        if self._attempt.head != self._board.me.host:
            return self._lost_leader()
        found = self._failed_host(announced)
        if found is not None:
            # At once: to end this host's workers takes seconds.
            self._board.announce(
                dataclasses.replace(announced, state="ended", why=found[2])
            )
            if found[0] == "ended":
                self._group.dump_stacks()
        return found

    def _lost_leader(self) -> tuple[Kind, int, str] | None:
        leader, head = self._board.leader, self._attempt.head
        if leader is not None and leader.lease > self._attempt.lease:
            self._group.dump_stacks()
            return "ended", 0, f"host {leader.host} leads now"
        if self._board.silence_of_leader() > self._limits.lost:
            member = self._board.whole_member(head)
            name = "" if member is None else f" ({member.hostname})"
            return "failed", 1, f"the supervisor of host {head}{name} is silent"
        return None

    def _failed_host(self, announced: Attempt) -> tuple[Kind, int, str] | None:
        for host, member_id in self._attempt.members.items():
            member = self._board.member(host)
            if host == self._board.me.host or member is None:
                continue
            changed = member.id != member_id
            outcome = member.outcome if member.attempt == announced.number else None
            if changed or (outcome is not None and outcome.kind != "done"):
                return "ended", 0, f"host {host} ended the attempt"
            if self._board.silent_seconds(member) > self._limits.lost:
                why = f"the supervisor of host {host} ({member.hostname}) is silent"
                return "failed", 1, why
        return None
