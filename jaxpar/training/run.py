"""What belongs to a run: its folder, and what must match when it is resumed.

``run.json`` records command, config, data identity, versions and commit at the first
start, and every change since. A folder that holds another run is refused and not
modified. ``events.jsonl`` records problems, and what was done about them.
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import xxhash

from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint.folder import complete_steps
from jaxpar.checkpoint.processes import from_first
from jaxpar.engine.engine import Engine
from jaxpar.launch.agreement import require_same
from jaxpar.launch.lease import is_lease, require_lease, take_lease, use_lease
from jaxpar.launch.worker_environment import current
from jaxpar.training.metrics import read_metrics
from jaxpar.training.record import (
    FILE,
    SAME_NUMBERS,
    as_json,
    differences,
    first_record,
    later_record,
    read,
    refused,
    resolved,
    write,
)
from jaxpar.types import Batch

_EVENTS, _CHECKPOINTS = "events.jsonl", "checkpoints"
_LAUNCH = "launch"
"""The launcher's folder."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder, checked to belong to it.

    Attributes:
      folder: holds everything that the run writes.
      record: the content of ``run.json``, once `accept` has been called.
      tensorboard: whether to write TensorBoard events.
      config: the run's config, with what was fixed at the first start.
    """

    folder: Path
    record: dict[str, Any]
    tensorboard: bool = False
    config: Any = None

    def accept(self, engine: Engine) -> None:
        """Record what has changed since the last start.

        Args:
          engine: that the run goes on with.

        Raises:
          ValueError: if a change gives other numbers with this engine. Nothing is
            written then.
        """
        line = from_first(lambda: self._unrecorded())
        for name, (before, now) in (line["changed"] if line else {}).items():
            why = engine.spec.changes_with.get(name)
            if why:
                raise ValueError(
                    f"{name} was {before!r} and is {now!r}, which changes this run's "
                    f"numbers: {why}. Give the former one, or choose another folder "
                    "(--out)."
                )
        if line and jax.process_index() == 0:
            require_lease(self.folder)
            write(self.folder, self.record)

    def _unrecorded(self) -> dict[str, Any] | None:
        """The newest line of the history, if the file does not have it yet."""
        history = self.record.get("history", [])
        written = (read(self.folder) or {}).get("history", [])
        return history[-1] if len(history) > len(written) else None

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / _CHECKPOINTS

    def resume(self, engine: Engine, data: Any = None) -> int | None:
        """Restore the newest valid checkpoint.

        Args:
          engine: restores the state.
          data: restores the position in the data; None to leave it.

        Returns:
          Its step; None if the run has none yet.
        """
        if self.newest() is None:
            return None
        return engine.restore(self.checkpoints, data=data)

    def newest(self) -> int | None:
        """The step of the newest valid checkpoint; None without one."""
        checkpoints = Checkpoints(self.checkpoints)
        checkpoints.wait()
        return from_first(checkpoints.latest)

    def batches_drawn(self, step: int) -> int:
        """Batches that had been drawn from the data when a step was saved."""
        return Checkpoints(self.checkpoints).meta(step).get("batches_drawn", step)

    def note(self, event: str, step: int, **fields: Any) -> None:
        """Add a line to the run's events, on process 0."""
        if jax.process_index() == 0:
            require_lease(self.folder)
            values = {
                name: str(x) if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in fields.items()
            }
            line = {"event": event, "step": step, "time": time.time(), **values}
            with (self.folder / _EVENTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """Read the run's events, on every process."""
        return from_first(lambda: _read_events(self.folder / _EVENTS))

    def numbers_before(self, step: int, most: int) -> list[list[float]]:
        """[loss, grad_norm] of the last steps logged before one, on every process."""
        path = self.folder / "metrics.jsonl"
        return from_first(lambda: _read_numbers(path, step)[-most:])

    def batches_left_out(self) -> set[int]:
        """Numbers, counted from the start, of batches that rollbacks have skipped."""
        lists = (event.get("left_out", ()) for event in self.events())
        return {ordinal for each in lists for ordinal in each}


def digest(batch: Batch) -> str:
    """A 128-bit hash of this process's rows of a batch, to recognize it."""
    own = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(batch):
        own.update(np.ascontiguousarray(leaf).tobytes())
    return own.hexdigest()


def _read_numbers(path: Path, step: int) -> list[list[float]]:
    records = read_metrics(path) if path.exists() else []
    return [
        [each["loss"], each["grad_norm"]] for each in records if each["step"] <= step
    ]


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Complete lines; the last one may be truncated."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def open_run(
    folder: str | os.PathLike[str],
    config: Any,
    identity: Mapping[str, Any],
    *,
    may_change: Iterable[str] = SAME_NUMBERS,
    fixed: Mapping[str, str] = MappingProxyType({"schedule_steps": "steps"}),
    tensorboard: bool | None = None,
) -> Run:
    """Start a run in a folder, or go on with the run that it holds.

    Args:
      folder: for everything that the run writes; made if missing.
      config: the run's config, a dataclass of JSON values.
      identity: what else must match to go on (the corpus's sha256).
      may_change: fields of the config that may differ from the last start, because they
        change no number but by rounding. `jaxpar.train` asks the engine whether that
        holds, and records the change.
      fixed: field of the config, None by default -> the field whose value it takes at
        the first start and keeps; a config without the field has nothing fixed.
      tensorboard: write TensorBoard events beside ``metrics.jsonl``; None for the
        config's field of that name, or not.

    Returns:
      The run; `Run.config` is the config with what is fixed.

    Raises:
      ValueError: if the folder holds another run, or files but no run, or is a file; if
        the processes of the run differ in config, code, data or versions.
      LeaseHeldError: if another process runs this run.
      PermissionError: if the folder can't be written.
    """
    wanted = as_json(config, identity)
    require_same(wanted["config"], wanted["identity"])
    fixed = {k: v for k, v in fixed.items() if k in wanted["config"]}
    asks = wanted, set(may_change), fixed
    record, lease = from_first(lambda: _claim(Path(folder), *asks))
    kept = {name: record["config"][name] for name in fixed}
    _say_fixed(record["config"], fixed)
    events = (
        getattr(config, "tensorboard", False) if tensorboard is None else tensorboard
    )
    config = dataclasses.replace(config, **kept)
    run = Run(Path(folder), record, events, config)
    use_lease(Path(folder), lease).keep_for(run)
    return run


def _say_fixed(config: Mapping[str, Any], fixed: Mapping[str, str]) -> None:
    """Say where a run goes on beyond what was fixed at its first start."""
    for name, source in fixed.items():
        if config[source] > config[name] and jax.process_index() == 0:
            print(
                f"{source} {config[source]}, {name} {config[name]} since the first "
                "start: beyond them the last learning rate is held"
            )


def _claim(
    folder: Path,
    wanted: Mapping[str, Any],
    may_change: Set[str],
    fixed: Mapping[str, str],
) -> tuple[dict[str, Any], int]:
    """Find or write the run's record, and its lease; called on process 0 only."""
    _require_usable(folder)
    _went_on(folder, wanted, may_change, fixed)
    worker = current()
    if worker and worker.lease and _same(worker.folder, folder):
        lease = use_lease(folder, worker.lease)
    else:
        lease = take_lease(folder)
    # Again: whoever had the lease before may have written it.
    found = _went_on(folder, wanted, may_change, fixed)
    if found is not None:
        return found, lease.number
    made = first_record(resolved(wanted, None, fixed))
    lease.require()
    write(folder, made)
    return made, lease.number


def _went_on(
    folder: Path,
    wanted: Mapping[str, Any],
    may_change: Set[str],
    fixed: Mapping[str, str],
) -> dict[str, Any] | None:
    """The record of the run in a folder as it goes on; None if there is none."""
    found = read(folder)
    if found is None:
        return None
    now = resolved(wanted, found, fixed)
    kept = {name: now["config"][name] for name in fixed if name not in found["config"]}
    found = {**found, "config": {**found["config"], **kept}}
    changed = differences(found, now)
    wrong = refused(changed, may_change)
    if wrong:
        raise ValueError(
            f"out={str(folder)!r} holds another run: {'; '.join(wrong)}. "
            "Choose another folder (--out), or the same settings to resume it."
        )
    step = max(complete_steps(folder / _CHECKPOINTS), default=None)
    return later_record(found, now, changed, step)


def _same(one: str | Path, other: str | Path) -> bool:
    return Path(one).absolute() == Path(other).absolute()


def _require_usable(folder: Path) -> None:
    """Raise if a folder holds neither a run nor nothing."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"out={str(folder)!r} is a file. Choose an empty or a new folder (--out)."
        )
    own = {_LAUNCH, Path(FILE).with_suffix(".tmp").name}
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    others = [name for name in found - own if not is_lease(name)]
    if others and FILE not in found:
        raise ValueError(
            f"out={str(folder)!r} has files but no {FILE}, so it is not a jaxpar run. "
            "Choose an empty or a new folder (--out)."
        )


def mean_loss(engine: Engine, batches: Iterable[Batch]) -> float:
    """Evaluate on several batches: sum(total) / sum(weight) over all of them.

    Args:
      engine: the engine.
      batches: each as `Engine.evaluate` takes it; at least one.

    Returns:
      The mean loss.
    """
    metrics = jax.device_get([engine.evaluate(batch) for batch in batches])
    weights = [float(each["weight"]) for each in metrics]
    totals = [
        float(each["loss"]) * weight
        for each, weight in zip(metrics, weights, strict=True)
    ]
    return sum(totals) / sum(weights)


def check_reopened(
    engine: Engine, run: Run, batches: Iterable[Batch], loss: float
) -> str:
    """Restore a run's newest checkpoint into another engine, and evaluate it there.

    Args:
      engine: of the same model, on any mesh.
      run: the run.
      batches: the batches that `loss` was evaluated on.
      loss: from the engine that saved.

    Returns:
      A line with the relative difference of the two losses.

    Raises:
      SystemExit: if they differ by more than rounding.
    """
    engine.restore(run.checkpoints)
    again = mean_loss(engine, batches)
    differs = abs(again - loss) / loss
    # Half-precision activations round differently when rows are split differently.
    is_half = engine.spec.precision.compute_dtype.itemsize < 4
    if differs > (5e-3 if is_half else 1e-6):
        raise SystemExit(
            f"The reopened checkpoint has another loss, {again:.6f} for {loss:.6f}."
        )
    count = engine.mesh.devices.size
    devices = "one device" if count == 1 else f"{count} devices"
    return f"held-out {again:.6f} reopened on {devices}: {differs:.0e} apart"
