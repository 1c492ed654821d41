"""How are the workers of one host started, signalled and ended?"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from jaxpar.launch.heartbeat import Beat, BeatFile
from jaxpar.launch.own_files import attempted, read, retried
from jaxpar.launch.rendezvous import WorkerEnd
from jaxpar.launch.worker_environment import Worker, read_error

STACKS_SIGNAL = signal.SIGUSR2
"""Signal that makes a worker dump its stacks, in whatever code it hangs."""

_STACKS_SECONDS = 5.0
_OUTERMOST_FRAME = "_run_module_as_main"
_TAIL_LINES, _TAIL_BYTES = 20, 16_384


class Group:
    """Workers that were started together.

    Args:
      workers: their environments.
      command: what each runs, after Python and the worker module.
    """

    def __init__(self, workers: Sequence[Worker], command: Sequence[str]):
        self.workers = workers
        self.began = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended_by_us: set[int] = set()
        unknown = Beat("start", None, None, self.began)
        self._beats = dict.fromkeys((worker.heartbeat for worker in workers), unknown)
        self._beat_files = {path: BeatFile(path) for path in self._beats}
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.end)
            for worker in workers:
                self._start(worker, command)
            on_failure.pop_all()

    def _start(self, worker: Worker, command: Sequence[str]) -> None:
        folder = Path(worker.files)
        retried(lambda: folder.mkdir(0o700, parents=True, exist_ok=True), folder)
        with retried(lambda: worker.log.open("wb"), worker.log) as log:
            process = subprocess.Popen(
                worker_command(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables(worker)},
                # Its children end with it, and the terminal's signals come to us only.
                start_new_session=True,
            )
        self._processes.append(process)

    def codes(self) -> list[int | None]:
        """Exit codes; minus the number for a signal; None while running."""
        return [process.poll() for process in self._processes]

    def beats(self) -> list[Beat]:
        """What each worker is doing; "start" until it has reported."""
        for path in self._beats:
            attempted(lambda path=path: self._read_beat(path), path)
        return [self._beats[worker.heartbeat] for worker in self.workers]

    def _read_beat(self, path: Path) -> None:
        self._beats[path] = self._beat_files[path].read() or self._beats[path]

    def stopped(self) -> set[int]:
        """The positions of workers that a signal has stopped."""
        found = set()
        for place, process in enumerate(self._processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    found.add(place)
        return found

    def send(self, number: int) -> None:
        """Send a signal to every running worker."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def dump_stacks(self) -> None:
        """Make every worker dump its stacks; stopped ones are continued for it."""
        self.send(STACKS_SIGNAL)
        self.send(signal.SIGCONT)
        until = time.monotonic() + _STACKS_SECONDS
        waiting = [
            worker
            for worker, process in zip(self.workers, self._processes, strict=True)
            if process.poll() is None
        ]
        while waiting and time.monotonic() < until:
            time.sleep(0.05)
            # The outermost frame of the main thread comes last.
            waiting = [w for w in waiting if _OUTERMOST_FRAME not in _stacks(w)]

    def end(self) -> None:
        """Kill what still runs: saved checkpoints are complete."""
        for worker, process in zip(self.workers, self._processes, strict=False):
            if process.poll() is None:
                self._ended_by_us.add(worker.index)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._close_beats()

    def _close_beats(self) -> None:
        for file in self._beat_files.values():
            file.close()

    def ends(self) -> list[WorkerEnd]:
        """How each ended."""
        beats = self.beats()
        self._close_beats()
        return [
            WorkerEnd(
                index=worker.index,
                code=None if worker.index in self._ended_by_us else code,
                at=str(beat),
                resumed=beat.resumed,
                step=beat.step,
                error=read_error(worker),
                tail=tail(worker.log),
                stacks=_stacks(worker).splitlines(),
            )
            for worker, beat, code in zip(
                self.workers, beats, self.codes(), strict=True
            )
        ]


def worker_command(command: Sequence[str]) -> list[str]:
    """The command that starts a worker."""
    return [sys.executable, "-m", "jaxpar.launch.worker", *command]


def variables(worker: Worker) -> Mapping[str, str]:
    """A worker's environment variables besides its supervisor's."""
    return {**worker.environment(), "PYTHONUNBUFFERED": "1"}


def tail(log: Path) -> list[str]:
    """The last lines of a log."""
    text = b""

    def read_end() -> None:
        nonlocal text
        with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read()

    attempted(read_end, log)
    return text.decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _stacks(worker: Worker) -> str:
    with contextlib.suppress(OSError):
        return (read(worker.stacks) or b"").decode(errors="replace")
    return ""
