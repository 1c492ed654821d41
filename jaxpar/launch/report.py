"""What happened to a run: the report in its folder, and on the launcher's terminal."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxpar.launch.own_files import append, read, retried
from jaxpar.launch.rendezvous import Attempt, Outcome, WorkerEnd

_FOLLOW_SECONDS = 0.1


class Report:
    """Writes ``launch/report.txt``, and prints what matters, from the host that leads.

    Args:
      folder: the run's.
      host: the number of this host.

    Attributes:
      is_head: whether this host leads; at first host 0 does.
    """

    def __init__(self, folder: Path, host: int):
        self.path = folder / "launch" / "report.txt"
        self.is_head = host == 0
        self._events = folder / "events.jsonl"
        self._began = time.time()

    def say(self, text: str) -> None:
        """Write a line to the terminal and to the report."""
        if self.is_head:
            print(f"launch: {text}", flush=True)
            self._add(text)

    def warn(self, text: str) -> None:
        """Write a line about this host, which need not lead."""
        if self.is_head:
            self.say(text)
        else:
            print(f"launch: {text}", file=sys.stderr, flush=True)

    def attempt(self, attempt: Attempt, outcomes: Mapping[int, Outcome]) -> None:
        """Report how an attempt ended: every host, every worker."""
        if not self.is_head:
            return
        lines = [f"attempt {attempt.number} on {time.strftime('%Y-%m-%d %H:%M:%S')}"]
        lines += self._slow_workers()
        for host, outcome in sorted(outcomes.items()):
            lines.append(f"host {host}: {outcome.kind}: {outcome.why}")
            for end in outcome.workers:
                lines += _worker(end, whole=outcome.kind != "done")
        self._add("\n".join(lines))
        errors = {
            end.error for each in outcomes.values() for end in each.workers if end.error
        }
        for error in sorted(errors - {each.why for each in outcomes.values()}):
            print(f"launch: {error}", file=sys.stderr, flush=True)

    def over(self, code: int, why: str) -> None:
        """Report how the run ended."""
        if code:
            self.say(why)
            self.say(f"ended with code {code}; more in {str(self.path)!r}")

    @contextlib.contextmanager
    def following(self, log: Path) -> Iterator[None]:
        """Copy new lines of a log to this terminal."""
        if not self.is_head:
            yield
            return
        self._began = time.time()
        is_over = threading.Event()
        thread = threading.Thread(target=_copy, args=(log, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _slow_workers(self) -> list[str]:
        """The run's own reports of slow workers, in this attempt."""
        found = []
        # Another process writes it: a line may be unfinished, and none is needed.
        with contextlib.suppress(OSError):
            for line in (read(self._events) or b"").splitlines():
                with contextlib.suppress(ValueError, LookupError, TypeError):
                    each = json.loads(line)
                    if each["event"] == "slow" and each["time"] >= self._began:
                        found.append(f"at step {each['step']}: {each['why']}")
        return found

    def _add(self, text: str) -> None:
        append(self.path, text + "\n")


def _worker(end: WorkerEnd, *, whole: bool) -> list[str]:
    """A worker's end; its log and stacks only if `whole`."""
    code = "ended by the supervisor" if end.code is None else f"code {end.code}"
    lines = [f"  worker {end.index}: {code}, at {end.at}"]
    if whole:
        lines += [f"    | {line}" for line in end.tail]
        lines += ["    stacks:"] if end.stacks else []
        lines += [f"    : {line}" for line in end.stacks]
    return lines


def _copy(log: Path, is_over: threading.Event) -> None:
    with contextlib.suppress(OSError), retried(lambda: log.open("rb"), log) as file:
        while True:
            was_over = is_over.is_set()
            new = retried(file.read, log)
            if new:
                sys.stdout.write(new.decode(errors="replace"))
                sys.stdout.flush()
            elif was_over:
                return
            else:
                is_over.wait(_FOLLOW_SECONDS)
