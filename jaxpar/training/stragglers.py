"""Is one worker slower than the others?

In a synchronous run all workers take as long as the slowest, so step times don't show
who is slow. The time that each worker alone would take is estimated from two parts: its
wait for data, and the common rest in proportion to its devices' time for a fixed small
piece of work.
"""

import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.training.performance import memory_bytes

FIELDS: tuple[str, ...] = ("step_seconds", "data_seconds", "work_seconds", "memory_gb")
"""What every worker reports: step time, wait for data, time of the fixed work."""

# Width and turns of the piece of work; on a CPU narrow enough to take one core.
_PIECES = {"cpu": (64, 1024)}
_PIECE = (2048, 8)
_REPEATS = 5
"""Times that the piece is done: another program may delay one of them."""

_SHARING = 8
"""Most CPU workers that may share a host; more would slow each other's work down."""


@dataclasses.dataclass(frozen=True)
class Slow:
    """A worker that is slower than the others.

    Attributes:
      worker: its index.
      times: its time over the others' median.
      why: the slow part.
    """

    worker: int
    times: float
    why: str


class StragglerDetector:
    """Measures this worker, receives the others' numbers, and finds the slow one.

    All workers call its methods in the same order. With one process nothing is measured
    or sent.

    Args:
      every: steps between comparisons.
      factor: a worker is slow if it takes this many times the median.
      lasting: consecutive comparisons that make it persistent: it is slow in their
        mean, and exceeds half of that slowdown in each of them.
    """

    def __init__(self, every: int, factor: float, lasting: int = 3):
        self._every = every if jax.process_count() > 1 else 0
        self._factor = factor
        self._waited, self._steps = 0.0, 0
        self._since = time.monotonic()
        self._gathered: jax.Array | None = None
        self._recent: dict[int, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=lasting)
        )
        self._slow: set[int] = set()

    def step(self, step: int, waited: float) -> bool:
        """Count a step.

        Args:
          step: its number.
          waited: seconds it waited for its batch.

        Returns:
          Whether to `gather`, once the devices are idle.
        """
        self._steps, self._waited = self._steps + 1, self._waited + waited
        return self._every > 0 and step % self._every == 0

    def gather(self) -> None:
        """Measure, and send it to the others, without waiting."""
        now = time.monotonic()
        steps = max(self._steps, 1)
        mine = {
            "step_seconds": (now - self._since) / steps,
            "data_seconds": self._waited / steps,
            "work_seconds": _alone_seconds(),
            "memory_gb": memory_bytes() / 1e9,
        }
        self._gathered = _gathered(
            np.array([mine[name] for name in FIELDS], np.float32)
        )
        self._waited, self._steps, self._since = 0.0, 0, time.monotonic()

    def collect(self) -> tuple[dict[str, float], list[Slow]]:
        """Take the numbers that were sent last.

        Returns:
          Each field's minimum, median and maximum, for the metrics; and the workers
          that have become persistently slow. Empty if nothing was sent.
        """
        gathered, self._gathered = self._gathered, None
        if gathered is None:
            return {}, []
        rows = np.asarray(jax.device_get(gathered))
        by_worker: list[dict[str, float]] = [
            {name: float(x) for name, x in zip(FIELDS, row, strict=True)}
            for row in rows
        ]
        numbers = {
            f"workers/{name}_{word}": reduce([each[name] for each in by_worker])
            for name in ("step_seconds", "data_seconds", "memory_gb")
            for word, reduce in (
                ("min", min),
                ("median", statistics.median),
                ("max", max),
            )
        }
        times = own_times(by_worker)
        before, self._slow = (
            self._slow,
            {w for w, t in enumerate(times) if self._is_slow(w, t)},
        )
        slow = [
            Slow(
                worker,
                statistics.fmean(self._recent[worker]),
                _reason(by_worker, worker),
            )
            for worker in sorted(self._slow - before)
        ]
        return numbers, slow

    def _is_slow(self, worker: int, times: float) -> bool:
        """Take one more comparison; whether the worker is now persistently slow."""
        recent = self._recent[worker]
        recent.append(times)
        lasts = len(recent) == recent.maxlen and min(recent) > (1 + self._factor) / 2
        return lasts and statistics.fmean(recent) > self._factor


def own_times(workers: Sequence[Mapping[str, float]]) -> list[float]:
    """Time that each worker alone would take, over the median of all.

    Args:
      workers: `FIELDS` of each.

    Returns:
      1 for the median worker, 2 for one that takes twice as long.
    """
    alone = [sum(parts.values()) for parts in _own_parts(workers)]
    median = statistics.median_low(alone)
    return [x / max(median, 1e-9) for x in alone]


def _own_parts(workers: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Seconds per step that each worker alone would wait, and work."""
    rests = [each["step_seconds"] - each["data_seconds"] for each in workers]
    common = max(min(rests), 0.0)
    usual = statistics.median_low([each["work_seconds"] for each in workers])
    return [
        {
            "data_seconds": each["data_seconds"],
            "work_seconds": common * each["work_seconds"] / max(usual, 1e-9),
        }
        for each in workers
    ]


def _reason(workers: Sequence[Mapping[str, float]], worker: int) -> str:
    """The part of a slow worker that exceeds the median most."""
    words = {
        "data_seconds": "waiting for its data",
        "work_seconds": "the same work on its devices",
    }
    parts = _own_parts(workers)

    def excess(name: str) -> float:
        return parts[worker][name] - statistics.median_low([x[name] for x in parts])

    name = max(words, key=excess)
    usual = statistics.median_low([each[name] for each in workers])
    mine = workers[worker][name]
    return f"{words[name]} took {mine:.3g} s, the others' {usual:.3g} s"


@functools.cache
def _piece_of_work() -> Any:
    @functools.partial(jax.jit, static_argnums=1)
    def work(x: jax.Array, turns: int) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ x), x)

    return work


def _alone_seconds() -> float:
    """As `_work_seconds`, while other workers of this host are idle."""
    if jax.local_devices()[0].platform != "cpu":
        return _work_seconds()
    sharing = min(jax.process_count(), _SHARING)
    turn, own_turn = _turn_seconds(), jax.process_index() % sharing
    time.sleep(own_turn * turn)
    seconds = _work_seconds()
    time.sleep((sharing - 1 - own_turn) * turn)
    return seconds


@functools.cache
def _turn_seconds() -> float:
    """Time reserved for the work on all devices of a process, enough for a slow one."""

    def whole_seconds() -> float:
        began = time.monotonic()
        _work_seconds()
        return time.monotonic() - began

    return 2.5 * min(whole_seconds() for _ in range(3))


def _work_seconds() -> float:
    """The longest time that a device of this process usually takes for the work."""

    def usual_seconds(device: Any) -> float:
        (piece, turns), work, found = _piece(device.id), _piece_of_work(), []
        for _ in range(_REPEATS):
            began = time.monotonic()
            jax.block_until_ready(work(piece, turns))
            found.append(time.monotonic() - began)
        return statistics.median(found)

    return max(map(usual_seconds, jax.local_devices()))


@functools.cache
def _piece(device_id: int) -> tuple[jax.Array, int]:
    device = next(d for d in jax.local_devices() if d.id == device_id)
    width, turns = _PIECES.get(device.platform, _PIECE)
    piece = jax.device_put(np.eye(width, dtype=np.float32), device)
    # Compiles first, so that compilation is not measured.
    jax.block_until_ready(_piece_of_work()(piece, turns))
    return piece, turns


def _gathered(row: np.ndarray) -> jax.Array:
    """Every process's row, on every process, computed asynchronously."""
    sharding, gather = _gather()
    mine = np.repeat(row[None], jax.local_device_count(), axis=0)
    return gather(jax.make_array_from_process_local_data(sharding, mine))


@functools.cache
def _gather() -> tuple[NamedSharding, Any]:
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    counts = collections.Counter(d.process_index for d in devices)
    firsts = np.cumsum([0, *(counts[p] for p in sorted(counts))])[:-1]
    mesh = Mesh(np.array(devices), ("all",))
    gather = jax.jit(lambda x: x[firsts], out_shardings=NamedSharding(mesh, P()))
    return NamedSharding(mesh, P("all")), gather


def describe_slow(slow: Slow) -> str:
    """A slow worker, as text."""
    return (
        f"worker {slow.worker} is {slow.times:.1f} times as slow as the others: "
        f"{slow.why}"
    )
