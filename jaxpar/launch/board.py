"""How do supervisors hear of each other: over a connection to the one that leads.

Every host's supervisor writes a small file in the run's shared folder when what it says
has changed, and the leader's writes each announcement. So a host needs nothing but that
folder. Who has said it last, and that it is alive, travels over one connection from
each host to the leader (`jaxpar.launch.store`): each end sends a sign of life four
times within the limit of silence. Where there is no connection, files have the signs
too: a count that grows. No two hosts' clocks are compared.
"""

import dataclasses
import json
import math
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

from jaxpar.launch.leader import (
    Leader,
    Succession,
    make_secret,
    read_leader,
    read_secret,
)
from jaxpar.launch.lease import require_lease
from jaxpar.launch.link import Link
from jaxpar.launch.own_files import attempted, retried, write_whole
from jaxpar.launch.rendezvous import Attempt, Member
from jaxpar.launch.store import Store
from jaxpar.launch.typed_json import as_kind, read_record

_BEAT = 1 / 4
"""Time between signs of life on a connection, as a share of the limit of silence."""
_FILE = 1 / 10
"""Time between signs in files, and between looks at those of others."""
_LEADERS_FILE = 1 / 20
_QUIET = 1 / 2
"""Share of the limit after which a host without a word writes signs into its file."""
_DOUBTED = 8 / 10
"""Share after which others look there."""
_FIRST_LOOK, _LONGEST_LOOK = 0.1, 1.5
"""Seconds between looks for the leader's address, doubling."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    processes: int


@dataclasses.dataclass(frozen=True)
class _Sign:
    """The last sign of life of a supervisor, and by which count of its file."""

    id: str
    count: int | None
    at: float
    is_alive: bool


class Board:
    """What the supervisors of all hosts say.

    Args:
      folder: of the launch; made if missing, for this user alone.
      host: the number of this host.
      processes: workers that it will start.
      address: where they listen.
      hosts: how many there are; a single one connects to nobody.
      lost: seconds of silence after which a supervisor counts as lost.

    Attributes:
      me: what this host says.
      leader: whom it follows; None for itself, or nobody so far.
      succession: of that leader.
    """

    def __init__(
        self,
        folder: Path,
        host: int,
        processes: int,
        address: str,
        *,
        hosts: int = 1,
        lost: float = 60.0,
    ):
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
        self.leader: Leader | None = None
        self.succession = Succession(folder.parent, lost)
        self._hosts, self._lost = hosts, lost
        self._store: Store | None = None
        self._link = Link(host)
        self._is_leading = False
        self._attempt: Attempt | None = None
        self._said: dict[int, Member] = {}
        self._signs: dict[int, _Sign] = {}
        self._next: dict[str, float] = {}
        self._look_seconds = _FIRST_LOOK
        self._has_warned = False

    # Who leads

    def lead(self, lease: int) -> None:
        """Lead the others from now on.

        Args:
          lease: the number of the run's lease, which this process has.
        """
        self._link.close()
        self.leader, self._is_leading = None, True
        self._take(read_record(Attempt, self.folder / "attempt.json"))
        if self._hosts == 1:
            return
        address, port = self.me.address, 0
        try:
            self._store = Store(address, make_secret(self.folder), self._hosts)
            port = self._store.port
        except OSError as error:
            self._warn(f"can't listen on {address} ({error.strerror or error})")
        own = Leader(lease, self.me.host, self.me.id, address, port)
        _write(self.folder / "leader.json", dataclasses.asdict(own))

    def follow(self) -> None:
        """Follow another host, which leads now."""
        self.close()
        self._is_leading = False

    def close(self) -> None:
        """Close all connections."""
        self._link.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    def may_lead(self) -> bool:
        """Whether the leader is lost, and it is this host's turn to take its place."""
        sign = None if self.leader is None else self._signs.get(self.leader.host)
        # One that was never heard may be of a launch long ago.
        was_heard = sign is not None and sign.is_alive
        return was_heard and self.succession.is_due(self._attempt, self.me.host)

    def silence_of_leader(self) -> float:
        """Seconds since the leader gave a sign of life; infinite without a leader."""
        sign = None if self.leader is None else self._signs.get(self.leader.host)
        return math.inf if sign is None else time.monotonic() - sign.at

    @property
    def messages(self) -> int:
        """Messages sent and received over connections so far."""
        return self._link.messages + (
            0 if self._store is None else self._store.messages
        )

    # What this host says

    def publish(self, **changes: Any) -> None:
        """Say what has changed, and give and hear signs of life.

        Args:
          changes: fields of `Member`.
        """
        new = dataclasses.replace(self.me, **changes)
        has_changed, self.me = new != self.me or not self.me.count, new
        own = _LEADERS_FILE if self._is_leading else _FILE
        if has_changed or (self._goes_by_file(_QUIET) and self._is_due("write", own)):
            self._write_own()
        if self._store is not None:
            self._hear_hosts(self._store)
        elif self._hosts > 1 and not self._is_leading:
            self._hear_leader(self._link)
            if has_changed:
                self._link.send(_sent(member=self.me))

    def _write_own(self) -> None:
        self.me = dataclasses.replace(self.me, count=self.me.count + 1)
        path, content = self._member_file(self.me.host), dataclasses.asdict(self.me)
        # The next one, a moment later, says the same.
        attempted(lambda: _write(path, content), path)

    def announce(self, attempt: Attempt) -> None:
        """Announce an attempt to all hosts; called by the leader."""
        _write(self.folder / "attempt.json", dataclasses.asdict(attempt))
        self._attempt = attempt
        if self._store is not None:
            self._store.send_all(_sent(attempt=attempt))

    def planned(self, processes: int) -> int:
        """The number of workers at the run's first launch; called by the leader."""
        path = self.folder / "plan.json"
        plan = read_record(_Plan, path)
        if plan is None:
            plan = _Plan(processes)
            _write(path, dataclasses.asdict(plan))
        return plan.processes

    # What others say

    def attempt(self) -> Attempt | None:
        """The leader's last announcement."""
        by_file = self._goes_by_file(_DOUBTED) and not self._is_leading
        if by_file and self._is_due("attempt"):
            self._take(read_record(Attempt, self.folder / "attempt.json"))
        return self._attempt

    def member(self, host: int) -> Member | None:
        """What a host's supervisor says, without texts; called by the leader."""
        if host == self.me.host and self.me.count:
            return self.me
        known = self._said.get(host)
        if not self._hears(host) and self._is_due(f"host {host}"):
            found = self.whole_member(host)
            # Its file may be older than what it has sent.
            if found and not (
                known and (found.id, found.count) < (known.id, known.count)
            ):
                known = self._said[host] = found
        return known

    def whole_member(self, host: int) -> Member | None:
        """What a host's file says."""
        return read_record(Member, self._member_file(host))

    def silent_seconds(self, member: Member, *, unseen: float = 0.0) -> float:
        """Seconds since a supervisor gave a sign of life.

        Args:
          member: as it was just read.
          unseen: seconds to add while it was never heard: its file may be left from a
            supervisor that ended long ago.
        """
        now, sign = time.monotonic(), self._signs.get(member.host)
        if sign is None or sign.id != member.id:
            sign = _Sign(member.id, member.count, now, is_alive=False)
        elif not self._hears(member.host):
            if sign.count is None:  # What the file said when its word began to count.
                sign = dataclasses.replace(sign, count=member.count)
            elif sign.count != member.count:
                sign = _Sign(member.id, member.count, now, is_alive=True)
        self._signs[member.host] = sign
        return now - sign.at + (0.0 if sign.is_alive else unseen)

    def _hear_hosts(self, store: Store) -> None:
        for host, message in store.poll():
            try:
                self._take_word(store, host, message)
            except (ValueError, TypeError, RecursionError):
                store.drop(host)
        if self._is_due("beat", _BEAT):
            store.send_all({})

    def _take_word(self, store: Store, host: int, message: Any) -> None:
        """Take a host's word: first None, then its record, later changes and signs."""
        if message is None:
            if self._attempt is not None:
                store.send(
                    host, {"attempt": dataclasses.asdict(self._attempt.without_texts())}
                )
            return
        if not isinstance(message, dict):
            raise TypeError(f"{str(message)[:40]!r} is not a message")
        if "member" in message:
            member = as_kind(Member, message["member"])
            if member.host != host:
                raise ValueError(f"host {host} speaks for host {member.host}")
            self._said[host] = member
        if host in self._said:
            self._heard(host, self._said[host].id)

    def _hear_leader(self, link: Link) -> None:
        for message in link.poll(
            [{"member": dataclasses.asdict(self.me.without_texts())}]
        ):
            try:
                found = message.get("attempt")
                # It is the word of who leads, whatever a file says.
                self._attempt = as_kind(Attempt, found) if found else self._attempt
            except (ValueError, TypeError, AttributeError, RecursionError):
                link.close()
                break
            assert self.leader is not None
            self._heard(self.leader.host, self.leader.id)
            self._look_seconds = _FIRST_LOOK
            self.succession.forget()
        if self._is_due("beat", _BEAT):
            link.send({})
        if self._goes_by_file(_QUIET) and self._is_due("look", self._look_seconds, 1.0):
            self._look_seconds = min(2 * self._look_seconds, _LONGEST_LOOK)
            self._look_for_leader(link)
        if self._goes_by_file(_DOUBTED) and self._is_due("doubt"):
            self._doubt(link)

    def _heard(self, host: int, supervisor: str) -> None:
        self._signs[host] = _Sign(supervisor, None, time.monotonic(), is_alive=True)

    def _look_for_leader(self, link: Link) -> None:
        """Find the newest leader, and connect to it."""
        found, known = read_leader(self.folder), self.leader
        if found is None or found.host == self.me.host:
            return
        if known is None or found.lease > known.lease:
            link.close()
            self.leader = found
            self.succession.forget()
            now = time.monotonic()
            self._signs[found.host] = _Sign(found.id, None, now, is_alive=False)
        secret = None if link.is_open else read_secret(self.folder)
        if secret is not None and found.port:
            link.connect(found.address, found.port, secret)

    def _doubt(self, link: Link) -> None:
        """Look for signs of the leader in files, and try a new connection."""
        leader = self.leader
        if leader is None:
            return
        self.succession.watch(leader)
        if link.is_open:  # Of a host that was cut off, it may never end by itself.
            link.close()
        found = self.whole_member(leader.host)
        if found is None or found.id != leader.id:
            return
        if self.silent_seconds(found) == 0.0 and link.error:
            self._warn(
                f"can't connect to host {leader.host} at {leader.address}:"
                f"{leader.port} ({link.error})"
            )

    def _hears(self, host: int) -> bool:
        """Whether there is a connection to a host that is not in doubt."""
        if self._store is None:
            is_leader = self.leader is not None and self.leader.host == host
            return is_leader and not self._goes_by_file(_DOUBTED)
        sign = self._signs.get(host)
        is_doubted = sign is None or time.monotonic() - sign.at > _DOUBTED * self._lost
        return host in self._store.connected and not is_doubted

    def _goes_by_file(self, share: float) -> bool:
        """Whether the leader has not been heard on a connection for some time."""
        is_silent = self.silence_of_leader() > share * self._lost
        return not self._link.is_open or is_silent

    def _is_due(self, what: str, share: float = _FILE, of: float | None = None) -> bool:
        """Whether it is time to do something again."""
        now = time.monotonic()
        if now < self._next.get(what, now):
            return False
        self._next[what] = now + share * (self._lost if of is None else of)
        return True

    def _take(self, found: Attempt | None) -> None:
        if found is not None and found.is_after(self._attempt):
            self._attempt = found

    def _warn(self, what: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        print(
            f"launch: the supervisor of host {self.me.host} {what}: supervisors go by "
            f"files in {str(self.folder)!r}, which takes the disk more work. Open TCP "
            "between the hosts, and give each one's address (--address)",
            file=sys.stderr,
            flush=True,
        )

    def _member_file(self, host: int) -> Path:
        return self.folder / f"host-{host:04d}.json"


def _sent(**records: Member | Attempt) -> dict[str, Any]:
    """A message."""
    return {n: dataclasses.asdict(each.without_texts()) for n, each in records.items()}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically."""
    require_lease(path)
    write_whole(path, json.dumps(content))
