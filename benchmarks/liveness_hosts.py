"""Hosts of benchmarks/liveness.py: supervisors without workers, and without jax.

    python benchmarks/liveness_hosts.py RUN FIRST LAST HOSTS LIMIT real|loops

With `real`, one host by `jaxpar.launch.supervisor.supervise` itself, with its workers
replaced by none. With `loops`, many hosts in one process: of each the real board and
the real watchdog's look at the others, ten times a second.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpar.launch import lease as leases
from jaxpar.launch import supervisor as supervisors
from jaxpar.launch.board import Board
from jaxpar.launch.group import Group
from jaxpar.launch.heartbeat import Beat
from jaxpar.launch.limits import Limits
from jaxpar.launch.rendezvous import POLL_SECONDS, Attempt, Outcome, WorkerEnd
from jaxpar.launch.start import Launch, workers_of
from jaxpar.launch.watchdog import Watchdog

FILE_EVENTS = ("open", "os.rename", "os.listdir", "os.scandir", "os.link", "os.remove")


class NoWorkers(Group):
    """Workers that run for ever."""

    def __init__(self, workers: Any, command: Any):
        del command
        self.workers = workers

    def codes(self) -> list[int | None]:
        """None has ended."""
        return [None]

    def beats(self) -> list[Beat]:
        """Nothing is known of them."""
        return []

    def dump_stacks(self) -> None:
        """There are none."""

    def end(self) -> None:
        """There is nothing to end."""

    def ends(self) -> list[WorkerEnd]:
        """There are none."""
        return []


class Log:
    """Events of a process, for the process that measures."""

    def __init__(self, path: Path, folder: Path):
        self._file = path.open("a")
        self._folder = str(folder)
        self._files = 0
        sys.addaudithook(self._count)

    def _count(self, event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and args and str(args[0]).startswith(self._folder):
            self._files += 1

    def write(self, event: str, host: int, number: int, **more: Any) -> None:
        """Add an event, with the time that all processes of a machine have."""
        record = {"at": time.monotonic(), "event": event, "host": host, **more}
        self._file.write(json.dumps({**record, "number": number}) + "\n")
        self._file.flush()

    def counts(self, boards: list[Board]) -> None:
        """Add how much was done so far."""
        messages = sum(board.messages for board in boards)
        seconds = time.process_time()
        host = boards[0].me.host
        self.write("counts", host, messages, files=self._files, cpu=seconds)


class Host:
    """A host without workers, one turn at a time."""

    def __init__(self, launch: Launch, log: Log):
        self.launch, self.log, self.number = launch, log, 0
        self.board = Board(
            launch.folder / "launch",
            launch.host,
            1,
            launch.address,
            hosts=launch.hosts,
            lost=launch.limits.lost,
        )
        self.watchdog: Watchdog | None = None

    def turn(self) -> None:
        """What a supervisor does ten times a second."""
        self.board.publish()
        if self.watchdog is not None:
            found = self.watchdog._end_elsewhere()  # The workers are left out.
            if found is not None:
                self.log.write(found[0], self.launch.host, self.number, why=found[2])
                self.watchdog = None
                outcome = Outcome(*found, [])
                self.board.publish(running=False, outcome=outcome)
            return
        attempt = self.board.attempt()
        own = attempt and attempt.members.get(self.launch.host) == self.board.me.id
        if attempt and own and attempt.state == "run" and attempt.number > self.number:
            self.number = attempt.number
            self.log.write("joined", self.launch.host, self.number)
            self.board.publish(attempt=self.number, running=True, outcome=None)
            group = NoWorkers(workers_of(self.launch, attempt), ())
            args = group, self.board, attempt, self.launch.limits
            self.watchdog = Watchdog(*args, lambda: None)


class CountedBoard(Board):
    """A board that writes its announcements and counts."""

    log: Log
    counted = 0.0

    def announce(self, attempt: Attempt) -> None:
        """Announce, and write when."""
        self.log.write(f"announced {attempt.state}", self.me.host, attempt.number)
        super().announce(attempt)

    def publish(self, **changes: Any) -> None:
        """Publish, and write now and then how much was done."""
        super().publish(**changes)
        if time.monotonic() - self.counted > 1.0:
            self.counted = time.monotonic()
            self.log.counts([self])


def run_real(launch: Launch, log: Log) -> None:
    """Be a host by the real supervisor."""
    CountedBoard.log = log
    supervisors.__dict__.update(Group=NoWorkers, Board=CountedBoard)
    sys.exit(supervisors.supervise(launch))


def run_loops(launches: list[Launch], log: Log) -> None:
    """Be many hosts in turn."""
    hosts = [Host(launch, log) for launch in launches]
    counted = 0.0
    while True:
        began = time.monotonic()
        for host in hosts:
            host.turn()
        if began - counted > 1.0:
            counted = began
            log.counts([host.board for host in hosts])
        time.sleep(max(0.0, began + POLL_SECONDS - time.monotonic()))


def main() -> None:
    """Run until it is killed."""
    folder = Path(sys.argv[1])
    first, last, hosts = map(int, sys.argv[2:5])
    limit, kind = float(sys.argv[5]), sys.argv[6]
    # As on machines of their own, where no process number tells that a holder is dead.
    leases.__dict__["_place"] = lambda: f"machine {first}"
    limits = Limits(lost=limit, rendezvous=max(10.0, limit), save=4 * limit)
    launches = [
        Launch(("none",), folder, 1, host, hosts, least_hosts=hosts - 8, limits=limits)
        for host in range(first, last)
    ]
    log = Log(folder / f"events-{first:04d}.jsonl", folder / "launch")
    if kind == "real":
        run_real(launches[0], log)
    run_loops(launches, log)


if __name__ == "__main__":
    main()
