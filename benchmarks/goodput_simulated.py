"""How much of a run's time is useful at a thousand hosts, with failures as they are?

Real: the supervisors of all hosts (benchmarks/virtual_hosts.py says what of them), and
the loop of worker 0, `jaxpar.training.loop.train` with its saves and its account of
time (all workers do the same). Virtual: the clock, the machines, and the engine: a
step, a save and a start take a given time. Llama 3 had an unexpected failure each three
hours at 2,048 hosts (419 in 54 days; The Llama 3 Herd of Models, section 3.3.4); other
numbers of hosts have as many for each host. Half of the failures end a worker, half a
machine, which another one replaces.

    python benchmarks/goodput_simulated.py --days 14
"""

import argparse
import contextlib
import dataclasses
import io
import math
import random
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from benchmarks.virtual_hosts import World
from jaxpar.launch.limits import Limits
from jaxpar.launch.rendezvous import POLL_SECONDS
from jaxpar.launch.start import Launch
from jaxpar.training import goodput, loop, run_loop
from jaxpar.training.recovery import Recovery

LLAMA_HOSTS, LLAMA_HOURS = 2048, 3.0
DAY = 86400.0


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the machines and the model, in seconds."""

    step: float = 12.0
    save_every: int = 10
    """Steps between saves."""
    blocked: float = 0.5
    """Of the loop, by each save."""
    write: float = 30.0
    """From a save's start until it is on the disk."""
    start: float = 30.0
    """From a worker's start until it joins: imports, certificates, devices."""
    restore: float = 15.0
    compile: float = 15.0
    """The first step, from the compilation cache."""
    replace: float = 120.0
    """Until another machine's supervisor is in a lost one's place."""
    lost: float = 15.0
    """--limits.lost."""
    machines: float = 0.5
    """Share of the failures that take the machine."""


class KilledError(BaseException):
    """Ends the loop as a signal would: nothing more is done."""


class Job:
    """What the workers do: the loop of worker 0, until a failure.

    Attributes:
      step: the last one that was done.
      resumed: the step that it went on from.
    """

    def __init__(self, costs: Costs, folder: Path):
        self.costs, self.folder = costs, folder
        self.step: int | None = None
        self.resumed: int | None = None
        self.saved: list[tuple[float, int]] = []
        self.now = self.until = 0.0
        self._begin: float | None = None
        self._waits: set[int] = set()
        self._attempt = 0
        self._created = 0.0

    def enter(self, world: World) -> None:
        """Have the loop live in a world."""
        clock = types.SimpleNamespace(
            monotonic=lambda: self.now, time=lambda: self.now, sleep=self.spend
        )
        process = types.SimpleNamespace(create_time=lambda: self._created)
        world.replace(
            goodput,
            time=clock,
            psutil=types.SimpleNamespace(Process=lambda: process),
            _WRITE_SECONDS=math.inf,  # It is written when the loop is killed.
            Clock=_RecordedClock,
        )
        world.replace(run_loop, time=clock)
        world.replace(loop, MetricsLogger=_NoLogger)

    def started(self, now: float, worker: Any) -> None:
        """Note that a worker has started; the last one begins the attempt."""
        if worker.attempt != self._attempt:
            self._attempt, self._waits = worker.attempt, set(range(worker.processes))
            self._begin = None
        self._waits.discard(worker.index)
        if not self._waits:
            self._begin = now

    def spend(self, seconds: float) -> None:
        """Let the time of the loop pass, or be killed meanwhile."""
        self.now += seconds
        if self.now >= self.until:
            self.now = self.until
            raise KilledError

    def stop(self, now: float) -> None:
        """Kill the workers: do now what they have done until then."""
        if self._begin is None:
            return
        self.now = self._created = self._begin
        self.until, self._begin = now, None
        engine: Any = _Engine(self)
        run: Any = _Run(self)
        with contextlib.suppress(KilledError):
            try:
                self.spend(self.costs.start)
                with contextlib.redirect_stdout(io.StringIO()):
                    loop.train(
                        engine,
                        engine.batches(),
                        run,
                        steps=10**9,
                        save_every=self.costs.save_every,
                        recovery=Recovery(probe_every=0, compare_every=0),
                    )
            finally:
                if _RecordedClock.last is not None:
                    _RecordedClock.last.write()
                    _RecordedClock.last = None
        # What was not on the disk is lost.
        self.saved = [each for each in self.saved if each[0] <= now]


class _RecordedClock(goodput.Clock):
    last: "_RecordedClock | None" = None

    def __init__(self, folder: Path):
        super().__init__(folder)
        _RecordedClock.last = self


class _NoLogger(contextlib.nullcontext):
    def __init__(self, *_: Any, **__: Any):
        super().__init__(self)

    def log(self, *_: Any) -> None:
        """Log nothing."""

    def flush(self) -> None:
        """Write nothing."""


class _Engine:
    """An engine whose steps take time and do nothing."""

    def __init__(self, job: Job):
        self._job, self.steps = job, 0
        self._is_compiled = False
        self.batch_spec = types.SimpleNamespace(num_rows=1)
        precision = types.SimpleNamespace(scales_loss=False)
        self.spec = types.SimpleNamespace(precision=precision)
        self.mesh = types.SimpleNamespace(devices=np.array(jax.devices()[:1]))
        reduction = types.SimpleNamespace(warm_up=lambda: 0)
        update = types.SimpleNamespace(reduction=reduction)
        self.placement = types.SimpleNamespace(update=update)
        self._metrics = {"loss": np.float32(1), "grad_norm": np.float32(1)}

    def batches(self) -> Any:
        """Batches that take no time."""
        while True:
            yield {"x": 0}

    def loss(self) -> Any:
        """What `Performance` asks for."""
        return types.SimpleNamespace(of_shapes=lambda _: None)

    def step(self, _: Any) -> dict[str, Any]:
        """A step."""
        costs = self._job.costs
        self._job.spend(costs.step if self._is_compiled else costs.compile)
        self._is_compiled = True
        self.steps += 1
        self._job.step = self.steps
        return self._metrics

    def save(self, *_: Any, **__: Any) -> None:
        """A save, whose end is later."""
        self._job.spend(self._job.costs.blocked)
        done = self._job.now + self._job.costs.write
        self._job.saved.append((done, self.steps))

    def has_failed_save(self, _: int) -> bool:
        """None fails."""
        return False

    def wait(self) -> None:
        """Wait for it."""
        last = self._job.saved[-1][0] if self._job.saved else 0.0
        self._job.spend(max(0.0, last - self._job.now))


class _Run:
    """A run whose checkpoints are numbers."""

    def __init__(self, job: Job):
        self._job, self.folder = job, job.folder
        self.checkpoints = job.folder / "checkpoints"
        self.record: dict[str, Any] = {"config": {}}
        self.writers, self.early_stop, self.profile = (), None, None

    def resume(self, engine: _Engine, _: Any = None) -> int | None:
        """Restore the newest."""
        if not self._job.saved:
            return None
        self._job.spend(self._job.costs.restore)
        engine.steps = self._job.saved[-1][1]
        self._job.resumed = self._job.step = engine.steps
        return engine.steps

    def drawn(self, *_: Any) -> tuple[int, int]:
        """Of what was drawn."""
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        """Everything else has nothing to tell."""
        return lambda *_, **__: []


def simulate(hosts: int, hours: float, days: float, costs: Costs, seed: int) -> dict:
    """A run of some days.

    Args:
      hosts: how many.
      hours: between failures.
      days: of the run.
      costs: of its parts.
      seed: of the failures.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        run.mkdir()
        job = Job(costs, run)
        limits = Limits(lost=costs.lost, rendezvous=1800.0, save=1800.0)
        launch = Launch(("none",), run, hosts=hosts, port=1, limits=limits)
        world = stack.enter_context(World(launch, job))
        job.enter(world)
        failures = plan_failures(world, hours, days, costs, random.Random(seed))
        world.run(days * DAY)
        job.stop(days * DAY)
        sums = goodput.total(goodput.read_account(run))
        codes, attempt = dict(world.codes), world.attempt
    assert not codes, f"a supervisor has ended: {codes}"
    assert attempt is not None
    whole = days * DAY
    interval = costs.step * costs.save_every
    restart = 1.0 + POLL_SECONDS + costs.start + costs.restore + costs.compile
    lost = interval / 2 + costs.write + costs.step / 2
    machines = costs.machines * max(costs.lost, costs.replace)
    expected = (1 - costs.blocked / interval) * (
        1 - (restart + lost + machines) / (hours * 3600)
    )
    return {
        "hosts": hosts,
        "hours_between_failures": hours,
        "failures": failures,
        "attempts": attempt.number,
        "led_by_others": world.lease - 1,
        "goodput": sums["step"] / whole,
        "formula": expected,
        "shares": {name: seconds / whole for name, seconds in sums.items()},
        "minutes_of_the_simulation": (time.perf_counter() - began) / 60,
    }


def plan_failures(
    world: World, hours: float, days: float, costs: Costs, rng: random.Random
) -> int:
    """Start all hosts, and have them fail at random; the number of failures."""
    hosts = range(world.launch.hosts)
    for number in hosts:
        world.at(0.0, lambda number=number: world.start(number))
    at, failures = rng.expovariate(1 / (hours * 3600)), 0
    while at < days * DAY:
        number, failures = rng.choice(hosts), failures + 1
        if rng.random() < costs.machines:
            world.at(at, lambda n=number: world.kill_host(n, costs.replace))
        else:
            world.at(at, lambda n=number: world.kill_worker(n))
        at += rng.expovariate(1 / (hours * 3600))
    return failures


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1000, 2048])
    parser.add_argument("--worse", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    args = parser.parse_args()
    threading.stack_size(1 << 19)
    console, found = Console(), []
    table = Table(box=box.MARKDOWN)
    names = ("hosts", "hours between failures", "failures", "attempts")
    for name in (*names, "led by another host", "goodput", "formula"):
        table.add_column(name, justify="right")
    for hosts in args.hosts:
        for worse in args.worse:
            hours = LLAMA_HOURS * LLAMA_HOSTS / hosts / worse
            row = simulate(hosts, hours, args.days, Costs(), seed=29)
            found.append(row)
            table.add_row(
                f"{hosts:,}",
                f"{hours:.2f}",
                f"{row['failures']}",
                f"{row['attempts']}",
                f"{row['led_by_others']}",
                f"{row['goodput']:.1%}",
                f"{row['formula']:.1%}",
            )
    console.print(table)
    measured = {"days": args.days, "costs": dataclasses.asdict(Costs()), "runs": found}
    console.print(write_result("goodput_simulated", measured))


if __name__ == "__main__":
    main()
