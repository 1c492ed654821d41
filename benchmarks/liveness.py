"""Do a thousand hosts find a lost one in time, and at which cost?

Supervisors on one machine, over real connections and a real folder: the leader and its
successor are whole supervisors without workers, the others loops with the real board
and watchdog, many in a process. One host is killed, then the leader. Measured:
operations of each second and host, the time until a lost host is known, and until all
hosts have what is announced then.

    python benchmarks/liveness.py --hosts 512 --limit 10
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result

HOSTS = Path(__file__).with_name("liveness_hosts.py")
LOOPS = 6
"""Processes of many hosts."""
START_SECONDS = 300


class Machine:
    """All hosts, and what they have written of themselves."""

    def __init__(self, folder: Path, hosts: int, limit: float):
        self.folder, self.hosts, self.limit = folder, hosts, limit
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start hosts 0 and 1, the last one alone, and the others in groups."""
        between = range(2, self.hosts - 1)
        size = -(-len(between) // LOOPS)
        self._start(0, 1, "real")
        self._start(1, 2, "real")
        for first in between[::size]:
            self._start(first, min(first + size, self.hosts - 1), "loops")
        self._start(self.hosts - 1, self.hosts, "loops")

    def _start(self, first: int, last: int, kind: str) -> None:
        args = map(str, (self.folder, first, last, self.hosts, self.limit, kind))
        log = (self.folder / f"log-{first:04d}.txt").open("wb")
        self.processes[first] = subprocess.Popen(
            [sys.executable, str(HOSTS), *args],
            stdout=log,
            stderr=log,
            # Each is to be counted alone, and one host is of one thread.
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )

    def events(self, event: str, number: int | None = None) -> list[dict[str, Any]]:
        """Events of one kind, of one attempt or all, in order of time."""
        found = []
        for path in self.folder.glob("events-*.jsonl"):
            for line in path.read_text().splitlines():
                each = json.loads(line)
                if each["event"] == event and number in (None, each["number"]):
                    found.append(each)
        return sorted(found, key=lambda each: each["at"])

    def until(self, found: Callable[[], Any], seconds: float) -> Any:
        """Wait for something."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if value := found():
                return value
            time.sleep(0.5)
        raise TimeoutError(f"{self.folder}: look at its logs")

    def joined(self, number: int, hosts: int) -> list[float]:
        """Seconds from an announcement until each host has it, once all have it."""
        self.until(lambda: len(self.events("joined", number)) >= hosts, START_SECONDS)
        (announced,) = self.events("announced run", number)
        return [e["at"] - announced["at"] for e in self.events("joined", number)]

    def kill(self, first: int) -> float:
        """Kill a process of hosts; the time of that."""
        at = time.monotonic()
        self.processes[first].kill()
        self.processes[first].wait()
        return at

    def operations(self, seconds: float) -> dict[str, float]:
        """What is done while nothing happens, for each second and host."""
        began = time.monotonic()
        time.sleep(seconds)
        rows = [e for e in self.events("counts") if e["at"] > began - 1.5]
        names = ("messages", "files", "cpu")
        total: dict[str, float] = dict.fromkeys(names, 0.0)
        leader = dict(total)
        for host in {row["host"] for row in rows}:
            own = [row for row in rows if row["host"] == host]
            span = own[-1]["at"] - own[0]["at"]
            for name, field in (
                ("messages", "number"),
                ("files", "files"),
                ("cpu",) * 2,
            ):
                rate = (own[-1][field] - own[0][field]) / span
                total[name] += rate
                leader[name] += rate if host == 0 else 0.0
        return {
            # Each is counted where it is sent and where it is received.
            "messages_per_second_and_host": total["messages"] / 2 / self.hosts,
            "files_per_second_and_host": total["files"] / self.hosts,
            "files_per_second_of_the_leader": leader["files"],
            "cpu_of_the_leader": leader["cpu"],
            "cpu_of_all": total["cpu"],
        }

    def cpu(self, since: float, until: float) -> float:
        """Seconds of all processes' CPU in a time, without what they take idle."""
        total = 0.0
        rows = self.events("counts")
        for host in {row["host"] for row in rows}:
            own = [row for row in rows if row["host"] == host]
            idle = [r for r in own if since - 6.0 < r["at"] < since]
            busy = [r for r in own if since - 1.5 < r["at"] < until + 1.5]
            if len(idle) > 1 and len(busy) > 1:
                span = idle[-1]["at"] - idle[0]["at"]
                rate = (idle[-1]["cpu"] - idle[0]["cpu"]) / span
                taken = busy[-1]["cpu"] - busy[0]["cpu"]
                total += taken - rate * (busy[-1]["at"] - busy[0]["at"])
        return total

    def end(self) -> None:
        """End all that was started."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def measure(machine: Machine) -> dict[str, Any]:
    """Start all, kill a host, then the leader."""
    hosts, limit = machine.hosts, machine.limit
    machine.start()
    # Hosts 0 and 1 are whole supervisors, which write no "joined".
    start = machine.joined(1, hosts - 2)
    found: dict[str, Any] = {"hosts": hosts, "limit_seconds": limit}
    found["agreement_at_start_seconds"] = max(start)
    time.sleep(limit)
    found |= machine.operations(max(2 * limit, 20.0))
    killed = machine.kill(hosts - 1)
    machine.until(lambda: machine.events("announced ended", 1), 3 * limit)
    ended = machine.events("announced ended", 1)[0]["at"]
    found["detection_seconds"] = ended - killed
    machine.until(lambda: len(machine.events("ended", 1)) >= hosts - 3, 3 * limit)
    last = machine.events("ended", 1)[-1]["at"]
    found["agreement_that_it_ended_seconds"] = last - ended
    time.sleep(2.0)
    found["cpu_of_that_ms_per_host"] = 1e3 * machine.cpu(ended, last) / hosts
    found["agreement_on_the_next_seconds"] = max(machine.joined(2, hosts - 3))
    time.sleep(limit)
    killed = machine.kill(0)

    def lost() -> list[float]:
        # Some may hear of the next leader before they have lost the last one.
        both = machine.events("failed", 2) + machine.events("ended", 2)
        return [each["at"] - killed for each in both]

    machine.until(lambda: len(lost()) >= hosts - 3, 3 * limit)
    found["detection_of_the_leader_seconds"] = [min(lost()), max(lost())]
    next_ = max(machine.joined(3, hosts - 3))
    found["agreement_under_the_next_leader_seconds"] = next_
    (again,) = machine.events("announced run", 3)
    assert again["host"] == 1, again
    found["next_leader_announced_after_seconds"] = again["at"] - killed
    found["load"] = os.getloadavg()[0]
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """Print what was measured."""
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in found.items():
        values = value if isinstance(value, list) else [value]
        table.add_row(name.replace("_", " "), " to ".join(f"{x:.3g}" for x in values))
    old = 10 * found["hosts"] ** 2
    table.add_row("opens a second as each host reads all, ten times", f"{old:,}")
    console.print(table)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=512)
    parser.add_argument("--limit", type=float, nargs="+", default=[10.0])
    parser.add_argument("--keep", action="store_true", help="leave the hosts' files")
    args = parser.parse_args()
    console = Console()
    measured = []
    for limit in args.limit:
        folder = Path(tempfile.mkdtemp())
        with contextlib.ExitStack() as stack:
            if not args.keep:
                stack.callback(shutil.rmtree, folder)
            machine = Machine(folder, args.hosts, limit)
            try:
                measured.append(measure(machine))
            finally:
                machine.end()
        show(measured[-1], console)
    console.print(write_result("liveness", {"runs": measured}))


if __name__ == "__main__":
    main()
