"""Supervisors of many hosts on one virtual clock, for benchmarks/goodput_simulated.py.

Each host is a thread that runs the real `jaxpar.launch.supervisor`: with `RunHead`,
`Watchdog`, `RestartBudget` and `Succession` as they are. What is replaced: the clock,
the connections and files between hosts (`VirtualBoard`, which delivers at once; how
long that takes is measured by benchmarks/liveness.py), the lease, and the workers. One
thread runs at a time. A thread that waits sleeps until something happens that its host
would hear of, instead of looking ten times a second.
"""

import contextlib
import dataclasses
import heapq
import itertools
import math
import threading
import types
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.launch import leader as leaders
from jaxpar.launch import rendezvous, restarts, watchdog
from jaxpar.launch import supervisor as supervisors
from jaxpar.launch.board import Board
from jaxpar.launch.group import Group
from jaxpar.launch.heartbeat import Beat
from jaxpar.launch.leader import Leader, Succession
from jaxpar.launch.lease import Holder, LeaseHeldError, LeaseLostError
from jaxpar.launch.rendezvous import Attempt, Member, WorkerEnd
from jaxpar.launch.report import Report
from jaxpar.launch.start import Launch
from jaxpar.launch.supervisor import _Supervisor

_LOOK_SECONDS = 5.0
"""Between looks of the leader at pauses and limits, while nothing runs."""
_HOLDER = Holder("virtual", "virtual", 0, None, "", "")


class Stopped(BaseException):
    """Ends the thread of a host."""


class VirtualHost:
    """A host's thread; `run` is called in it."""

    def __init__(self, world: "World", number: int, launch: Launch):
        self.world, self.number, self.launch = world, number, launch
        self.turn, self.is_stirred, self.is_alive = threading.Semaphore(0), True, True
        self.died, self.ticket = math.inf, 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.board: VirtualBoard | None = None

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if self.is_alive:
                supervisor = _Supervisor(self.launch)
                if self.world.lease == 0 and self.number == 0:
                    supervisor.lead(self.world.take_lease())
                self.world.codes[self.number] = supervisor.run()
        except Stopped:
            pass
        finally:
            if self.is_alive:  # It has ended by itself.
                self.world.lose(self)
            self.world.main.release()


class World(contextlib.ExitStack):
    """The clock, and all that hosts hear of each other, for the time of its block.

    Args:
      launch: of host 0.
      job: what the workers do.
    """

    def __init__(self, launch: Launch, job: Any):
        super().__init__()
        self.launch, self.job = launch, job
        self.now, self.lease, self.main = 0.0, 0, threading.Semaphore(0)
        self.hosts: dict[int, VirtualHost] = {}
        self.members: dict[int, Member] = {}
        self.boards: dict[str, VirtualHost] = {}
        self.attempt: Attempt | None = None
        self.leader: Leader | None = None
        self.groups: dict[int, VirtualGroup] = {}
        self.codes: dict[int, int] = {}
        self.lines: list[str] = []
        self.current: VirtualHost | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __enter__(self) -> "World":
        """Have supervisors live in it."""
        super().__enter__()
        self.callback(self._end_hosts)
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        for module in (rendezvous, supervisors, watchdog, restarts, leaders):
            self.replace(module, time=clock)
        self.replace(
            supervisors,
            Board=lambda *args, **options: VirtualBoard(self, *args, **options),
            Group=lambda workers, command: VirtualGroup(self, workers, command),
            Report=lambda folder, host: VirtualReport(self, folder, host),
            take_lease=lambda *_, **__: types.SimpleNamespace(number=self.take_lease()),
            give_up_lease=lambda _: None,
            listen=lambda *_: None,
        )
        return self

    def replace(self, module: types.ModuleType, **names: Any) -> None:
        """Give names of a module other values, until the end of the block."""
        self.enter_context(unittest.mock.patch.dict(module.__dict__, names))

    def _end_hosts(self) -> None:
        for host in self.hosts.values():
            host.is_alive = False
            if host.thread.is_alive():
                self._turn(host)
                host.thread.join()

    # Time

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (when, next(self._order), do))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            when, _, do = heapq.heappop(self._events)
            self.now = max(self.now, when)
            do()
        self.now = until

    def sleep(self, seconds: float) -> None:
        """What hosts call instead of `time.sleep`."""
        host = self.current
        assert host is not None
        if host.is_stirred:
            wake = self.now + seconds
        elif self.is_led_by(host.number) and not (host.board and host.board.me.running):
            wake = self.now + _LOOK_SECONDS
        else:
            wake = math.inf
        host.is_stirred = False
        self._wake_at(host, wake)
        self.main.release()
        host.turn.acquire()
        if not host.is_alive:
            raise Stopped

    def stir(self, number: int) -> None:
        """Have a host look, at its next poll."""
        host = self.hosts.get(number)
        if host is not None and host.is_alive and host is not self.current:
            host.is_stirred = True
            self._wake_at(host, self.now + rendezvous.POLL_SECONDS)
        elif host is not None:
            host.is_stirred = True

    def _wake_at(self, host: VirtualHost, when: float) -> None:
        host.ticket += 1
        ticket = host.ticket
        if when < math.inf:
            self.at(when, lambda: self._turn(host) if host.ticket == ticket else None)

    def _turn(self, host: VirtualHost) -> None:
        before, self.current = self.current, host
        host.turn.release()
        self.main.acquire()
        self.current = before

    # Hosts

    def start(self, number: int) -> None:
        """Start a host's supervisor, as on a new machine."""
        launch = dataclasses.replace(self.launch, host=number)
        host = self.hosts[number] = VirtualHost(self, number, launch)
        host.thread.start()
        self._turn(host)

    def kill_host(self, number: int, back_after: float) -> None:
        """End a host's supervisor and workers; another machine takes its place."""
        host = self.hosts[number]
        if not host.is_alive:
            return
        if host.board is not None and host.board.me.running:
            self.job.stop(self.now)
        self.lose(host)
        if host.thread.is_alive():
            self._turn(host)
        self.at(self.now + back_after, lambda: self.start(number))

    def lose(self, host: VirtualHost) -> None:
        """Have the others notice, once a host has been silent for the limit."""
        host.is_alive, host.died = False, self.now
        host.ticket += 1
        known = self.now + self.launch.limits.lost + rendezvous.POLL_SECONDS
        of_leader = self.is_led_by(host.number)
        self.at(known, lambda: self._notice(everybody=of_leader))

    def kill_worker(self, number: int) -> None:
        """End a host's worker alone."""
        group = self.groups.get(number)
        host = self.hosts[number]
        if host.is_alive and group is not None and not group.is_over:
            self.job.stop(self.now)
            group.code = -9
            self.stir(number)

    def _notice(self, *, everybody: bool) -> None:
        assert self.leader is not None
        for number in [*self.hosts] if everybody else [self.leader.host]:
            self.stir(number)
        if everybody:
            # Those whose turn it is not now look again, until somebody leads.
            led = self.hosts[self.leader.host]
            if not led.is_alive:
                self.at(self.now + 1.0, lambda: self._notice(everybody=True))

    def is_led_by(self, number: int) -> bool:
        """Whether a host leads."""
        return self.leader is not None and self.leader.host == number

    def take_lease(self) -> int:
        """The lease of the run, if nobody alive has it."""
        if self.leader is not None and self.boards[self.leader.id].is_alive:
            raise LeaseHeldError("the leader is alive")
        self.lease += 1
        return self.lease


class VirtualReport(Report):
    """Keeps what is said."""

    def __init__(self, world: World, folder: Path, host: int):
        super().__init__(folder, host)
        self._world = world

    def say(self, text: str) -> None:
        """Keep a line."""
        if self.is_head:
            self._world.lines.append(f"{self._world.now:.0f} s: {text}")

    def attempt(self, attempt: Attempt, outcomes: Any) -> None:
        """Write nothing."""

    def following(self, log: Path) -> Any:
        """Copy nothing."""
        return contextlib.nullcontext()


class VirtualGroup(Group):
    """A host's worker, which runs until it is killed or ended."""

    def __init__(self, world: World, workers: Any, command: Any):
        del command
        assert world.current is not None
        self.workers, self._world = workers, world
        self.code: int | None = None
        self.is_over = False
        world.groups[world.current.number] = self
        world.job.started(world.now, workers[0])

    def codes(self) -> list[int | None]:
        """Exit codes."""
        return [self.code]

    def beats(self) -> list[Beat]:
        """What it is doing."""
        return [
            Beat("step", self._world.job.step, self._world.job.resumed, self._world.now)
        ]

    def dump_stacks(self) -> None:
        """There are none."""

    def end(self) -> None:
        """End it."""
        self.is_over = True

    def ends(self) -> list[WorkerEnd]:
        """How it ended."""
        job = self._world.job
        index = self.workers[0].index
        return [WorkerEnd(index, self.code, "", job.resumed, job.step, None, [], [])]


class VirtualBoard(Board):
    """What hosts hear of each other, at once."""

    def __init__(self, world: World, *args: Any, **options: Any):
        del options["hosts"]
        self._world, self._limit = world, options.pop("lost")
        folder, host, processes, address = args
        self.folder, self.leader = folder, None
        folder.mkdir(exist_ok=True)
        self.me = Member(
            host=host,
            id=f"{host}-{next(world._order)}",
            count=1,
            hostname="virtual",
            address=address,
            processes=processes,
        )
        self.succession = Succession(folder.parent, self._limit)
        self._lease = 0
        assert world.current is not None
        world.boards[self.me.id] = world.current
        world.current.board = self

    def publish(self, **changes: Any) -> None:
        """Say what has changed."""
        world = self._world
        new = dataclasses.replace(self.me, **changes)
        if world.members.get(self.me.host) != new:
            self.me = world.members[self.me.host] = new
            if world.leader is not None:
                world.stir(world.leader.host)
        if not self._lease:
            self.leader = world.leader

    def announce(self, attempt: Attempt) -> None:
        """Announce an attempt, if this host leads."""
        if self._lease != self._world.lease:
            raise LeaseLostError("another host leads")
        self._world.attempt = attempt
        for number in [*self._world.hosts]:
            self._world.stir(number)

    def planned(self, processes: int) -> int:
        """Those that are there."""
        return processes

    def attempt(self) -> Attempt | None:
        """The last announcement."""
        return self._world.attempt

    def member(self, host: int) -> Member | None:
        """What a host says."""
        return self._world.members.get(host)

    whole_member = member

    def silent_seconds(self, member: Member, *, unseen: float = 0.0) -> float:
        """Since it died."""
        del unseen
        return max(0.0, self._world.now - self._world.boards[member.id].died)

    def silence_of_leader(self) -> float:
        """Since it died."""
        leader = self._world.leader
        if leader is None:
            return math.inf
        return max(0.0, self._world.now - self._world.boards[leader.id].died)

    def may_lead(self) -> bool:
        """Whether the leader is lost, and it is this host's turn."""
        leader = self._world.leader
        if leader is None or self._world.boards[leader.id].is_alive:
            return False
        self.succession.holder = _HOLDER
        self.succession._since = self._world.boards[leader.id].died
        return self.succession.is_due(self._world.attempt, self.me.host)

    def lead(self, lease: int) -> None:
        """Lead the others."""
        self._lease, self.leader = lease, None
        self._world.leader = Leader(lease, self.me.host, self.me.id, "", 0)
        for number in [*self._world.hosts]:
            self._world.stir(number)

    def close(self) -> None:
        """There is nothing to close."""
