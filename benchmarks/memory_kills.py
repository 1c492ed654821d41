"""What does a lost worker, supervisor or host cost a run that is kept in memory?

Two hosts (two launchers of this machine, each with a memory of its own) train with a
copy in memory every few steps, and no checkpoint on disk after the first. By turns a
worker, a launcher with its workers, or a whole host (both, and its memory) is killed at
a random moment. For each kill: the steps that had been done and were lost, and the time
until the run was back at the step where it was. Beside it, the time of a start with
compiled programs in the cache.

    python benchmarks/memory_kills.py
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.launch.heartbeat import Beat, read_heartbeat

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests/multiprocess/script.py"
KINDS = ("worker", "launcher", "host")
LIMIT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Config:
    """How many kills, and how often a copy is made."""

    kills: int = 40
    """Kills, by turns of a worker, a launcher and a host; the result is written for
    the default number only."""
    every: int = 5
    """Steps between copies in memory."""
    pause: float = 0.2
    """Seconds that a batch takes, so that steps are as long as real ones."""
    seed: int = 0
    """Of the moments, and of the hosts."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """What a kill cost.

    Attributes:
      kind: of `KINDS`.
      host: which one.
      done: the step that was done last.
      resumed: the step that the run went on from.
      seconds: from the kill to the first step that was done after it.
    """

    kind: str
    host: int
    done: int
    resumed: int
    seconds: float


class Hosts:
    """The launchers of two hosts, and a run on them.

    Args:
      out: the run's folder.
      flags: of the script.
      environment: of all processes.
    """

    def __init__(self, out: Path, flags: tuple[str, ...], environment: dict[str, str]):
        self.out, self._flags, self._environment = out, flags, environment
        out.parent.mkdir(parents=True, exist_ok=True)
        self.launchers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Hosts":
        self.launchers = [self._start(host) for host in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.launchers:
            if each.poll() is None:
                each.kill()
            each.wait()

    def _start(self, host: int) -> subprocess.Popen[bytes]:
        own = ("--hosts=2", f"--host={host}", "--restarts=1000", "--limits.lost=5")
        args = ["-m", "jaxpar", "launch", "local", "--out", str(self.out), *own]
        with self.log(host).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *args, str(SCRIPT), "--", *self._flags],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, host: int) -> Path:
        """The file of a launcher's output."""
        return self.out.with_suffix(f".{host}.log")

    def attempt(self) -> int:
        """The number of the newest attempt; 0 before the first."""
        path = self.out / "launch" / "attempt.json"
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text())["number"]
        return 0

    def beat(self, attempt: int) -> Beat | None:
        """What worker 0 of an attempt is doing."""
        folder = self.out / "launch" / f"{attempt:04d}"
        return read_heartbeat(folder / "worker-0000.heartbeat")

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """Wait for something to come true, while the launchers run."""
        limit = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < limit:
            value = found()
            if value:
                return value
            if any(each.poll() is not None for each in self.launchers):
                raise RuntimeError(f"{what}: ended before\n{self.output()}")
            time.sleep(0.01)
        raise RuntimeError(f"{what}: not within {LIMIT_SECONDS:g} s\n{self.output()}")

    def output(self) -> str:
        """The end of what the launchers have said."""
        return "\n".join(self.log(host).read_text()[-4000:] for host in range(2))

    def is_at(self, step: int, attempt: int) -> bool:
        """Whether an attempt has begun the step after one."""
        beat = self.beat(attempt)
        return beat is not None and (beat.step or 0) > step >= (beat.resumed or 0)

    def kill(self, kind: str, host: int) -> Kill:
        """Kill a part of a host, and start it again; what it cost."""
        attempt = self.attempt()
        beat = self.beat(attempt)
        done = (beat and beat.step) or 0
        launcher, began = self.launchers[host], time.monotonic()
        if kind == "worker":
            for each in psutil.Process(launcher.pid).children():
                if "jaxpar.launch.worker" in " ".join(each.cmdline()):
                    os.kill(each.pid, signal.SIGKILL)
        else:
            launcher.kill()
            launcher.wait()
            if kind == "host":
                for each in memory_of(self.out, host):
                    shutil.rmtree(each)
            self.launchers[host] = self._start(host)
        self.until(lambda: self.attempt() == attempt + 1, f"attempt {attempt + 1}")
        self.until(lambda: self.resumed(attempt + 1) is not None, "the state")
        resumed = self.resumed(attempt + 1)
        assert resumed is not None
        self.until(lambda: self.is_at(resumed + 1, attempt + 1), "a step")
        seconds = time.monotonic() - began
        # A step is counted when the next one has begun.
        return Kill(kind, host, done - 1, resumed, seconds)

    def resumed(self, attempt: int) -> int | None:
        """The step that an attempt went on from; None before it is known."""
        beat = self.beat(attempt)
        return None if beat is None else beat.resumed


def memory_of(out: Path, host: int) -> list[Path]:
    """The folders in memory of a run's host."""
    return [
        path
        for path in Path("/dev/shm").glob(f"jaxpar-{os.getuid()}-*-{host}")
        if (path / "run").read_text() == str(out)
    ]


def drill(out: Path, config: Config, environment: dict[str, str]) -> list[Kill]:
    """Train through kills to the end; what each cost."""
    rng = random.Random(config.seed)
    steps = (config.kills + 1) * (2 * config.every + 2)
    own = (f"--recovery.memory-every={config.every}", f"--pause={config.pause:g}")
    flags = (*own, f"--steps={steps}", f"--save-every={steps}")
    found = []
    with Hosts(out, flags, environment) as hosts:
        for number in range(config.kills):
            resumed = hosts.until(
                lambda n=number: hosts.resumed(n + 1) is not None, "a start"
            ) and hosts.resumed(number + 1)
            until = (resumed or 0) + rng.randrange(2, 2 * config.every + 1)
            hosts.until(
                lambda n=number, s=until: hosts.is_at(s, n + 1), f"step {until}"
            )
            time.sleep(rng.uniform(0.0, config.pause))
            found.append(hosts.kill(KINDS[number % 3], rng.randrange(2)))
            print(found[-1], flush=True)
        codes = [each.wait(LIMIT_SECONDS) for each in hosts.launchers]
        if any(codes):
            raise RuntimeError(f"ended with {codes}\n{hosts.output()}")
    return found


def start_seconds(out: Path, environment: dict[str, str], pause: float) -> float:
    """Seconds from the launch of two hosts to the end of the first step."""
    flags = ("--steps=4", "--save-every=4", f"--pause={pause:g}")
    began = time.monotonic()
    with Hosts(out, flags, environment) as hosts:
        hosts.until(lambda: hosts.is_at(1, 1), "a step")
        seconds = time.monotonic() - began
        for each in hosts.launchers:
            each.wait(LIMIT_SECONDS)
    return seconds


def main(config: Config) -> None:
    """Measure, print, and write the result."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(place / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        (place / "cache").mkdir(mode=0o700)
        starts = [
            start_seconds(place / f"start-{i}", environment, config.pause)
            for i in range(4)
        ][1:]
        kills = drill(place / "run", config, environment)
    start = statistics.median(starts)
    measured: dict[str, Any] = {"every": config.every, "start_seconds": start}
    for kind in KINDS:
        own = [each for each in kills if each.kind == kind]
        lost = [max(0, each.done - each.resumed) for each in own]
        down = [each.seconds for each in own]
        measured[kind] = {
            "kills": len(own),
            "lost_steps_median": statistics.median(lost),
            "lost_steps_most": max(lost),
            "restart_seconds_median": statistics.median(down),
            "restart_seconds_most": max(down),
            "restart_over_start_median": statistics.median(down) / start,
        }
    print(json.dumps(measured, indent=2))
    if config.kills == Config.kills:
        write_result("memory_kills", measured)


if __name__ == "__main__":
    main(parse(Config, __doc__))
