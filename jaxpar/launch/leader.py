"""Which host leads, and when may another one take its place?

The leader has the run's lease (`jaxpar.launch.lease`), which one process can take, and
names itself and where it listens in ``launch/leader.json``. Host 0 leads first. If its
supervisor is lost, another host takes the lease: the lowest of the last attempt first,
each following one a little later. Only who holds the lease can announce anything.
"""

import dataclasses
import json
import secrets
import time
from collections.abc import Set
from pathlib import Path

from jaxpar.launch.lease import Holder, newest_lease, read_holder, require_lease
from jaxpar.launch.own_files import is_private, read, write_whole
from jaxpar.launch.rendezvous import Attempt
from jaxpar.launch.typed_json import read_record

_SECRET_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Leader:
    """The supervisor that leads.

    Attributes:
      lease: the number by which it leads.
      host: its host's number.
      id: its own, see `Member`.
      address: where it listens.
      port: there; 0 if it does not listen.
    """

    lease: int
    host: int
    id: str
    address: str
    port: int


def read_leader(folder: Path) -> Leader | None:
    """Who leads, as the launch's folder says; None for nobody so far."""
    return read_record(Leader, folder / "leader.json")


def is_led_elsewhere(folder: Path, host: int) -> bool:
    """Whether another host of this launch holds the run's lease.

    Args:
      folder: of the launch.
      host: the number of this host.
    """
    found = read_leader(folder)
    return (
        found is not None
        and found.host != host
        and found.lease == newest_lease(folder.parent)
    )


@dataclasses.dataclass(frozen=True)
class _LeftOut:
    hosts: list[int]


def write_left_out(folder: Path, hosts: Set[int]) -> None:
    """Note the hosts that are left out, for a later leader."""
    path = folder / "left_out.json"
    require_lease(path)
    write_whole(path, json.dumps(dataclasses.asdict(_LeftOut(sorted(hosts)))))


def read_left_out(folder: Path) -> set[int]:
    """The hosts that a leader of this launch has left out."""
    found = read_record(_LeftOut, folder / "left_out.json")
    return set() if found is None else set(found.hosts)


def make_secret(folder: Path) -> bytes:
    """Write a new secret of the supervisors, for this user alone, and return it."""
    made = secrets.token_bytes(_SECRET_BYTES)
    write_whole(folder / "secret", made.hex(), private=True)
    return made


def read_secret(folder: Path) -> bytes | None:
    """The secret of the supervisors; None if there is none, or others can read it."""
    path = folder / "secret"
    if not is_private(path):
        return None
    try:
        found = bytes.fromhex((read(path, at_most=4 * _SECRET_BYTES) or b"").decode())
    except ValueError:
        return None
    return found if len(found) == _SECRET_BYTES else None


class Succession:
    """Watches the lease of a leader that is not heard any more.

    Args:
      folder: the run's.
      seconds: silence of the lease after which another host may take it.
    """

    def __init__(self, folder: Path, seconds: float):
        self._folder, self._seconds = folder, seconds
        self._step = max(0.5, seconds / 20)
        self.forget()

    def forget(self) -> None:
        """Begin anew: the leader was heard."""
        self.holder: Holder | None = None
        self._since = self._free_since = None

    def watch(self, leader: Leader) -> None:
        """Look at the lease, now and then while the leader is not heard."""
        now = time.monotonic()
        found = read_holder(self._folder, leader.lease)
        if found is not None and found != self.holder:
            self.holder, self._since, self._free_since = found, now, None
        if found is not None and (found.is_over or found.is_dead()):
            self._free_since = self._free_since or now

    def is_due(self, attempt: Attempt | None, host: int) -> bool:
        """Whether it is this host's turn to lead.

        Args:
          attempt: the last one; None if there was none.
          host: the number of this host.
        """
        if self.holder is None or self._since is None:
            return False
        free = self._free_since
        since = self._since + self._seconds if free is None else free
        members = set() if attempt is None else attempt.members.keys() - {attempt.head}
        order = sorted(members)
        place = order.index(host) if host in order else len(order) + host
        return time.monotonic() >= since + place * self._step
