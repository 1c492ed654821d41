"""Which case is next, and what becomes of it: until the list or the time is over."""

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import lines
from benchmarks.gpu.artefacts import Artefacts
from benchmarks.gpu.items import Case, Item
from benchmarks.gpu.lines import Key, State
from benchmarks.gpu.machine import Device
from benchmarks.gpu.processes import run

ROOT = Path(__file__).resolve().parents[2]
REFUSING = Path(__file__).resolve().parent / "refusing"
RESERVE = 15.0
"""Seconds of a call that no case gets: to pack what it leaves, and for the summary."""


@dataclasses.dataclass(frozen=True)
class Day:
    """A call of the program.

    Attributes:
      out: the folder for what is found.
      device: that is measured.
      code: the digest of the sources.
      commit: as git names it.
      minutes: until the call ends.
      dry: whether this is the dry run.
      torch_python: an interpreter that has torch.
      again: whether settled cases are run once more.
    """

    out: Path
    device: Device
    code: str
    commit: str
    minutes: float
    dry: bool = False
    torch_python: str = sys.executable
    again: bool = False

    @property
    def results(self) -> Path:
        """The file of results."""
        return self.out / lines.FILE


def choose(
    items: Sequence[Item], states: Mapping[Key, State], day: Day, begun: set[Key]
) -> Iterator[tuple[Item, Case, Key]]:
    """The cases that are to be run, in order; failed ones behind all others.

    Args:
      items: in order.
      states: where cases stand.
      day: the call.
      begun: cases that this call has begun with `Day.again`, or that were cut.
    """
    found = []
    for item in items:
        for case in item.cases:
            key = Key(item.name, case.name, day.code, day.device.name)
            state = states.get(key, State())
            is_open = not state.settled or day.again
            if is_open and key not in begun:
                found.append((state.failures, item, case, key))
    for _, item, case, key in sorted(found, key=lambda each: each[0]):
        yield item, case, key


def go(day: Day, items: Sequence[Item], say: Callable[[str], None] = print) -> None:
    """Run cases until all are settled or none fits into the time that is left."""
    ends = time.monotonic() + 60 * day.minutes - (0 if day.dry else RESERVE)
    begun: set[Key] = set()
    _name_unbuilt(day, items)
    with tempfile.TemporaryDirectory(prefix="gpu_day_") as work:
        artefacts = Artefacts(day.out, Path(work), day.device.name)
        while True:
            states = lines.states(lines.read(day.results))
            ready = list(choose(items, states, day, begun))
            fits = [each for each in ready if _fits(each[1], ends)]
            if not fits:
                break
            item, case, key = fits[0]
            event = _take(day, item, case, key, ends, artefacts, say)
            if day.again or event == lines.CUT:
                begun.add(key)
        for item, case, _ in ready:
            say(f"not begun: {item.name}, {case.name}: needs {case.minutes:g} min")


def _fits(case: Case, ends: float) -> bool:
    return time.monotonic() + 60 * case.minutes <= ends


def _name_unbuilt(day: Day, items: Sequence[Item]) -> None:
    """Write down the items that have nothing to measure yet."""
    known = lines.states(lines.read(day.results))
    for item in items:
        key = Key(item.name, "", day.code, day.device.name)
        if item.not_built and key not in known:
            _write(day, key, lines.NOT_BUILT, why=item.not_built)


def _take(
    day: Day,
    item: Item,
    case: Case,
    key: Key,
    ends: float,
    artefacts: Artefacts,
    say: Callable[[str], None],
) -> str:
    """Run a case and write down what it finds and how it ends."""
    title = f"{item.name}, {case.name}"
    if day.device.memory_gb < case.needs_gb:
        has = f"{day.device.name} has {day.device.memory_gb:.0f} GB"
        why = f"needs {case.needs_gb:g} GB, and {has}"
        _write(day, key, lines.SKIPPED, why=why)
        say(f"skipped: {title}: {why}")
        return lines.SKIPPED
    left = ends - time.monotonic()
    say(f"begun: {title}: about {case.minutes:g} of {left / 60:.1f} min left")
    artefacts.clear()
    own = 60 * case.limit_minutes
    outcome = run(
        _command(day, case, artefacts.keep),
        _environment(day, case, artefacts),
        artefacts.keep / "log.txt",
        limit=min(own, max(left, 1.0)),
        is_own_limit=own <= left,
        receive=lambda value: _write(day, key, lines.RESULT, **value),
    )
    is_done = outcome.event == lines.DONE
    artefacts.pack(f"{item.name}.{case.name}", is_done=is_done)
    _write(day, key, outcome.event, seconds=round(outcome.seconds, 1), why=outcome.why)
    why = outcome.why.splitlines()[-1:] if outcome.event != lines.SKIPPED else []
    told = f": {outcome.why.splitlines()[0]} {' '.join(why)}" if outcome.why else ""
    say(f"{outcome.event}: {title}: {outcome.seconds:.0f} s{told[:300]}")
    return outcome.event


def _write(day: Day, key: Key, event: str, **values: Any) -> None:
    kept = {name: value for name, value in values.items() if value not in ("", None)}
    beside = {"commit": day.commit, "time": round(time.time())}
    line = {**dataclasses.asdict(key), "event": event, **kept, **beside}
    lines.append(day.results, line)


def _command(day: Day, case: Case, keep: Path) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.case", case.call]
    command += [json.dumps(dict(case.arguments)), "--keep", str(keep)]
    command += ["--torch-python", day.torch_python]
    return [*command, "--dry-run"] if day.dry else command


def _environment(day: Day, case: Case, artefacts: Artefacts) -> dict[str, str]:
    """The variables of a case's process."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if day.dry:
        path.insert(0, str(REFUSING))
    flags = [os.environ.get("XLA_FLAGS", ""), *artefacts.xla_flags(), *case.xla_flags]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": " ".join(filter(None, flags)),
        # One of several GPUs: the driver's first, which `Device` names.
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        "JAX_COMPILATION_CACHE_DIR": str(artefacts.work / "jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(artefacts.work / "torch_cache"),
    }
    if day.dry:
        own |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        own |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return os.environ | own | dict(case.environment)


def open_results(day: Day, done: Path | None) -> None:
    """Begin with what earlier calls have found.

    Args:
      day: the call.
      done: the folder of an earlier call; None for none.

    Raises:
      ValueError: if it is not a folder.
    """
    day.out.mkdir(parents=True, exist_ok=True)
    if done is None or done.resolve() == day.out.resolve():
        return
    if not done.is_dir():
        raise ValueError(
            f"--done {done}: must be the --out folder of an earlier call; leave it out "
            "in the first one."
        )
    for path in (done / lines.FILE, *done.glob("autotune-*.txt")):
        if path.is_file() and not (day.out / path.name).exists():
            shutil.copyfile(path, day.out / path.name)
