"""What belongs to a run: its folder, and what must match when it is resumed.

``run.json`` records command, config, data identity, versions and commit at the first
start. A folder that holds another run is refused and not modified. ``events.jsonl``
records problems, and what was done about them.
"""

import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Set
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from jaxpar.checkpoint import Checkpoints
from jaxpar.checkpoint.processes import from_first
from jaxpar.engine.engine import Engine
from jaxpar.launch.agreement import require_same
from jaxpar.training.metrics import read_metrics
from jaxpar.types import Batch

_FILE, _EVENTS = "run.json", "events.jsonl"
_LAUNCH = "launch"
"""The launcher's folder."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder, checked to belong to it.

    Attributes:
      folder: holds everything that the run writes.
      record: the content of ``run.json``.
      tensorboard: whether to write TensorBoard events.
    """

    folder: Path
    record: dict[str, Any]
    tensorboard: bool = False

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

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


MAY_CHANGE = ("keep", "mesh", "recovery", "tensorboard")
"""Fields of a config that change no number of a run, but for rounding."""


def open_run(
    folder: str | os.PathLike[str],
    config: Any,
    identity: Mapping[str, Any],
    *,
    may_change: Iterable[str] = MAY_CHANGE,
    tensorboard: bool = False,
) -> Run:
    """Start a run in a folder, or resume the run that it holds.

    Args:
      folder: for everything that the run writes; made if missing.
      config: the run's config, a dataclass of JSON values.
      identity: what else must match to resume (the corpus's sha256).
      may_change: fields of the config that may differ from the first start.
      tensorboard: write TensorBoard events beside ``metrics.jsonl``.

    Returns:
      The run.

    Raises:
      ValueError: if the folder holds another run, or files but no run, or is a file; if
        the processes of the run differ in config, code, data or versions.
      PermissionError: if the folder can't be written.
    """
    wanted = json.loads(
        json.dumps({"config": dataclasses.asdict(config), "identity": dict(identity)})
    )
    require_same(wanted["config"], wanted["identity"])
    passed_over = set(may_change)
    record = from_first(lambda: _claim(Path(folder), wanted, passed_over))
    return Run(Path(folder), record, tensorboard)


def _claim(
    folder: Path, wanted: Mapping[str, Any], may_change: Set[str]
) -> dict[str, Any]:
    """Find or write the run's record; called on process 0 only."""
    record = folder / _FILE
    if record.exists():
        found = json.loads(record.read_text(encoding="utf-8"))
        differing = _differences(found, wanted, may_change)
        if differing:
            raise ValueError(
                f"out={str(folder)!r} holds another run: {'; '.join(differing)}. "
                "Choose another folder (--out), or the same settings to resume it."
            )
        return found
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"out={str(folder)!r} is a file. Choose an empty or a new folder (--out)."
        )
    unfinished = record.with_suffix(".tmp")
    if folder.exists() and set(folder.iterdir()) - {unfinished, folder / _LAUNCH}:
        raise ValueError(
            f"out={str(folder)!r} has files but no {_FILE}, so it is not a jaxpar run. "
            "Choose an empty or a new folder (--out)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("jax", "flax", "optax")
    }
    made = {**wanted, "versions": versions, "command": sys.argv, "commit": _commit()}
    unfinished.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(record)
    return made


def _commit() -> str | None:
    """The commit of the script's repository, "+" if files differ; None without one."""
    where = Path(sys.argv[0]).absolute().parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+"],
            cwd=where if where.is_dir() else None,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


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


def _differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], may_change: Set[str]
) -> list[str]:
    """What differs in config and identity, as ``name: there, here``."""
    lines = []
    for part in ("config", "identity"):
        there, here = found.get(part, {}), wanted[part]
        for name in sorted((there.keys() | here.keys()) - may_change):
            if there.get(name) != here.get(name):
                lines.append(
                    f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
                )
    return lines
