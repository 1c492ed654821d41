"""Is one worker slower than the others?

In a synchronous run all take as long as the slowest, so their step times tell nothing.
What each would take alone is put together: how long it waited for its data, and the
common rest in proportion to how long its devices take for one and the same small piece
of work.
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
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FIELDS: tuple[str, ...] = ("step_seconds", "data_seconds", "work_seconds", "memory_gb")
"""What every worker tells: of a step, of its wait for data, of the same work."""

# Width and turns of the piece of work; on a CPU so narrow that it takes one core.
_PIECES = {"cpu": (64, 2048)}
_PIECE = (2048, 8)

_SHARING = 8
"""CPU workers at most that share a host, and would slow each other's piece down."""


@dataclasses.dataclass(frozen=True)
class Slow:
    """A worker that is slower than the others.

    Attributes:
      worker: its index.
      times: as long as the others' median, of its own part.
      why: what of it is slow.
    """

    worker: int
    times: float
    why: str


class StragglerDetector:
    """Measures this worker, hears of the others, and finds the slow one.

    All workers call its methods in the same order. Nothing is measured or told where
    there is one process.

    Args:
      every: steps between comparisons.
      factor: as slow as this, against the median, is slow.
      lasting: comparisons in a row that make it persistent: it is slow in their mean,
        and at least half as much slower in each of them.
    """

    def __init__(self, every: int, factor: float, lasting: int = 3):
        self._every = every if jax.process_count() > 1 else 0
        self._factor = factor
        self._waited, self._steps = 0.0, 0
        self._since = time.monotonic()
        self._told: jax.Array | None = None
        self._recent: dict[int, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=lasting)
        )
        self._slow: set[int] = set()

    def step(self, step: int, waited: float) -> bool:
        """Count a step.

        Args:
          step: its number.
          waited: for its batch, in seconds.

        Returns:
          Whether to `tell`, once nothing is under way on the devices.
        """
        self._steps, self._waited = self._steps + 1, self._waited + waited
        return self._every > 0 and step % self._every == 0

    def tell(self) -> None:
        """Measure, and send it to the others; nothing is waited for."""
        now = time.monotonic()
        steps = max(self._steps, 1)
        mine = {
            "step_seconds": (now - self._since) / steps,
            "data_seconds": self._waited / steps,
            "work_seconds": _alone_seconds(),
            "memory_gb": _memory_bytes() / 1e9,
        }
        self._told = _gathered(np.array([mine[name] for name in FIELDS], np.float32))
        self._waited, self._steps, self._since = 0.0, 0, time.monotonic()

    def hear(self) -> tuple[dict[str, float], list[Slow]]:
        """Take what was told last.

        Returns:
          Each field's least, median and greatest, for the metrics; and the workers that
          have become persistently slow. Empty where nothing was told.
        """
        told, self._told = self._told, None
        if told is None:
            return {}, []
        rows = np.asarray(jax.device_get(told))
        by_worker: list[dict[str, float]] = [
            {name: float(x) for name, x in zip(FIELDS, row, strict=True)}
            for row in rows
        ]
        numbers = {
            f"{name}_{word}": reduce([each[name] for each in by_worker])
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
        """Take one more comparison; whether the worker is persistently slow by now."""
        recent = self._recent[worker]
        recent.append(times)
        lasts = len(recent) == recent.maxlen and min(recent) > (1 + self._factor) / 2
        return lasts and statistics.fmean(recent) > self._factor


def own_times(workers: Sequence[Mapping[str, float]]) -> list[float]:
    """How long each worker would take alone, against the median of all.

    Args:
      workers: of each, `FIELDS`.

    Returns:
      1 for the median worker, 2 for one that takes twice as long.
    """
    alone = [sum(parts.values()) for parts in _own_parts(workers)]
    median = statistics.median_low(alone)
    return [x / max(median, 1e-9) for x in alone]


def _own_parts(workers: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Seconds of a step that each worker alone would wait, and work."""
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
    """What of a slow worker takes most above the median."""
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
    """As `_work_seconds`, while other workers of this host keep still."""
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
    """What this process takes for the same work, with some to spare."""
    return 1.5 * min(_work_seconds() for _ in range(3))


def _work_seconds() -> float:
    """The longest that one of this process's devices takes for the same work."""
    work, longest = _piece_of_work(), 0.0
    for device in jax.local_devices():
        piece, turns = _piece(device.id)
        began = time.monotonic()
        jax.block_until_ready(work(piece, turns))
        longest = max(longest, time.monotonic() - began)
    return longest


@functools.cache
def _piece(device_id: int) -> tuple[jax.Array, int]:
    device = next(d for d in jax.local_devices() if d.id == device_id)
    width, turns = _PIECES.get(device.platform, _PIECE)
    piece = jax.device_put(np.eye(width, dtype=np.float32), device)
    # Compiles, which must not count.
    jax.block_until_ready(_piece_of_work()(piece, turns))
    return piece, turns


def _memory_bytes() -> float:
    """The most that one device has held; of CPU devices, what the process holds."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each.get("peak_bytes_in_use", 0) for each in stats]
    return max(peaks) or psutil.Process().memory_info().rss


def _gathered(row: np.ndarray) -> jax.Array:
    """Every process's row, on every process, when it is asked for."""
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


def describe(slow: Slow) -> str:
    """A slow worker, in words."""
    return (
        f"worker {slow.worker} is {slow.times:.1f} times as slow as the others: "
        f"{slow.why}"
    )
