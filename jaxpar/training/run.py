"""What belongs to a run: its folder, its record and its events.

``events.jsonl`` records problems, and what was done about them.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from jaxpar.checkpoint import Checkpoints, Keep
from jaxpar.checkpoint.memory_tier import MemoryTier
from jaxpar.checkpoint.places import place_of
from jaxpar.checkpoint.processes import from_first
from jaxpar.engine.engine import Engine
from jaxpar.launch.lease import require_lease
from jaxpar.launch.own_files import append
from jaxpar.launch.own_files import read as read_file
from jaxpar.training.changes import restore_changed, schedule_counts
from jaxpar.training.early_stop import EarlyStop
from jaxpar.training.metrics import read_metrics
from jaxpar.training.origin import load_parameters
from jaxpar.training.record import changes_numbers, checkpoints_of, read, write
from jaxpar.training.recovery import Recovery
from jaxpar.training.writers import MetricsWriter
from jaxpar.types import Batch, Params

EVENTS = "events.jsonl"
NEW_DATA = "new data"
"""The event of a run that goes on at the first row of another stream."""


Hook = Callable[[int, Mapping[str, float], Engine], None]
"""Called with a step, its numbers and the engine."""


@dataclasses.dataclass(frozen=True)
class RunRules:
    """Arguments of `train` that do not change."""

    steps: int
    save_every: int
    keep: int | Keep | None
    recovery: Recovery
    hooks: tuple[Hook, ...]
    profiled: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder, checked to belong to it.

    Attributes:
      folder: holds everything that the run writes.
      record: the content of ``run.json``, once `accept` has been called.
      writers: of the numbers, beside ``metrics.jsonl``.
      config: the run's config, with what was fixed at the first start.
      change: whether this start may change the run's numbers.
      profile: the first and the last step to trace; None for none.
      early_stop: when the run ends before its last step; None for never.
      memory: of the hosts, where newer steps may be; None for none.
    """

    folder: Path
    record: dict[str, Any]
    writers: tuple[MetricsWriter, ...] = ()
    config: Any = None
    change: bool = False
    profile: tuple[int, int] | None = None
    early_stop: EarlyStop | None = None
    memory: MemoryTier | None = None

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
            if why and not self.change:
                raise ValueError(
                    f"{name} was {before!r} and is {now!r}, which changes this run's "
                    f"numbers: {why}. Give the former one, choose another folder "
                    "(--out), or --change to go on with it."
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
    def checkpoints(self) -> Path | str:
        """The folder of its checkpoints, or the URL of one in a bucket."""
        return checkpoints_of(self.folder, self.record)

    def resume(self, engine: Engine, data: Any = None) -> int | None:
        """Restore the newest valid checkpoint, or a newer state from memory.

        Args:
          engine: restores the state.
          data: restores the position in the data; None to leave it.

        Returns:
          Its step; None if the run has none yet.
        """
        newest = self.newest()
        if newest is None:
            return None
        if self.memory is not None and not self.changes_since(newest):
            with contextlib.suppress(FileNotFoundError):
                step = engine.restore(self.memory, data=data)
                self.note("restored from memory", step, newest_checkpoint=newest)
                return step
        place = place_of(self.checkpoints)
        oldest = from_first(lambda: min(place.complete()))
        if not self.changes_since(oldest):
            return engine.restore(self.checkpoints, data=data)
        # A damaged newest one is passed over: changes count from the one restored.
        step = from_first(lambda: place.choose(None, {})["step"])
        since = self.changes_since(step)
        if not since:
            return engine.restore(self.checkpoints, data=data)
        kinds = [kind for line in since for kind in _optimizers(line)]
        anew = restore_changed(
            engine, self.checkpoints, step, data, new_optimizer=kinds[:1] != kinds[-1:]
        )
        if anew:
            self.note("optimizer began anew", step, leaves=anew)
            if jax.process_index() == 0:
                print(f"optimizer state that begins anew: {_listed(anew)}")
                if schedule_counts(anew):
                    print("the optimizer's schedule begins again at step 0")
        return step

    def changes_since(self, step: int) -> list[dict[str, Any]]:
        """Lines of the history, at or after a step, that changed the run's numbers."""
        return [
            line
            for line in self.record.get("history", [])
            if changes_numbers(line) and (line["step"] or 0) >= step
        ]

    def begin(self, engine: Engine) -> None:
        """Give a new run the parameters that it starts from, if it does."""
        origin = self.record.get("init_from")
        if origin is None:
            return
        step = load_parameters(engine, origin)
        self.note("began from", engine.steps, origin=origin, origin_step=step)
        if jax.process_index() == 0:
            at = "" if step is None else f", step {step}"
            print(f"starts with the parameters of {origin}{at}")

    def require_no_progress(self) -> None:
        """Check that a run without a checkpoint has not been trained.

        Raises:
          FileNotFoundError: if its log has steps: the checkpoints are gone, or are on a
            disk that is not here.
        """
        logged = from_first(lambda: _last_step(self.folder / "metrics.jsonl"))
        if logged:
            raise FileNotFoundError(
                f"out={str(self.folder)!r} has logged {logged} steps, but there is no "
                f"checkpoint in {str(self.checkpoints)!r}, so that it would start "
                "anew. Mount or bring back that folder, or choose another one (--out)."
            )

    def newest(self) -> int | None:
        """The step of the newest valid checkpoint; None without one."""
        checkpoints = Checkpoints(self.checkpoints)
        checkpoints.wait()
        return from_first(checkpoints.latest)

    def drawn(self, step: int, batch_rows: int) -> tuple[int, int]:
        """(batches, rows) that had been drawn from the data when a step was saved."""
        meta = self._meta(step)
        batches = meta.get("batches_drawn", step)
        return batches, meta.get("rows_drawn", batches * batch_rows)

    def with_memory(self) -> "Run":
        """This run, with newer steps in the memory of its hosts."""
        memory = MemoryTier(self.folder, checkpoints=self.checkpoints)
        return dataclasses.replace(self, memory=memory)

    def keep_in_memory(
        self, engine: Engine, data: Any, meta: Mapping[str, Any]
    ) -> None:
        """Keep a state in memory, with its position in the data and other values."""
        assert self.memory is not None, "of a run with memory"
        engine.save(self.memory, data=data, meta=dict(meta))

    def forget_memory(self) -> None:
        """Never resume from what is in memory so far."""
        if self.memory is not None:
            self.memory.forget()

    def close_memory(self, *, delete: bool) -> None:
        """Keep no more in memory; delete what is there, or leave it."""
        if self.memory is not None:
            self.memory.close(delete=delete)

    def _meta(self, step: int) -> dict[str, Any]:
        kept = self.memory.meta(step) if self.memory else None
        return Checkpoints(self.checkpoints).meta(step) if kept is None else kept

    def recall_left_out(self, step: int, batch_rows: int) -> list[tuple[int, int]]:
        """As `rows_left_out`, with those that a checkpoint knows and no event names."""
        known = self.rows_left_out(batch_rows)
        saved = self._meta(step).get("rows_left_out", ())
        found = sorted({*known, *((first, last) for first, last in saved)})
        if found != known:
            self.note("left out before", step, rows_left_out=found)
        return found

    def note(self, event: str, step: int, **fields: Any) -> None:
        """Add a line to the run's events, on process 0."""
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # Of a disk that can't show a lease.
                require_lease(self.folder)
            values = {
                name: str(x) if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in fields.items()
            }
            line = {"event": event, "step": step, "time": time.time(), **values}
            append(self.folder / EVENTS, json.dumps(line, allow_nan=False) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """Read the run's events, on every process."""
        return from_first(lambda: _read_events(self.folder / EVENTS))

    def numbers_before(self, step: int, most: int) -> list[list[float]]:
        """[loss, grad_norm] of the last steps logged before one, on every process."""
        path = self.folder / "metrics.jsonl"
        return from_first(lambda: _read_numbers(path, step)[-most:])

    def evaluated_until(self, step: int) -> list[tuple[int, dict[str, float]]]:
        """(step, its numbers) of evaluations logged up to a step, on every process."""
        path = self.folder / "metrics.jsonl"
        return [
            (at, own) for at, own in from_first(lambda: _read_evaluated(path, step))
        ]

    def rows_left_out(self, batch_rows: int) -> list[tuple[int, int]]:
        """(start, stop) rows, counted from the start, that rollbacks have left out.

        Args:
          batch_rows: of a batch, for events that were written in batches.
        """
        found: list[tuple[int, int]] = []
        for event in self.events():
            if event["event"] == NEW_DATA:
                found = []
            batches = [
                (each * batch_rows, (each + 1) * batch_rows)
                for each in event.get("left_out", ())
            ]
            found += [(a, b) for a, b in event.get("rows_left_out", batches)]
        return sorted(set(found))


def _optimizers(line: Mapping[str, Any]) -> list[Any]:
    """The kinds of optimizer before and after a line of the history that changes it."""
    return [
        each.get("kind") if isinstance(each, dict) else each
        for each in line["changed"].get("optimizer", ())
    ]


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    more = len(names) - most
    return f"{shown} and {more} more ({EVENTS} has all)" if more > 0 else shown


def _last_step(path: Path) -> int:
    """The last step of a log; 0 if there is none."""
    records = read_metrics(path)
    return max((int(each["step"]) for each in records), default=0)


def digest(batch: Batch) -> str:
    """A 128-bit hash of this process's rows of a batch, to recognize it."""
    own = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(batch):
        own.update(np.ascontiguousarray(leaf).tobytes())
    return own.hexdigest()


def _read_numbers(path: Path, step: int) -> list[list[float]]:
    records = read_metrics(path)
    names = "train/loss", "train/grad_norm"
    return [
        [each[name] for name in names]
        for each in records
        if each["step"] <= step and each.keys() >= set(names)
    ]


def _read_evaluated(path: Path, step: int) -> list[tuple[int, dict[str, float]]]:
    records = read_metrics(path)
    found = [
        (each["step"], {k: x for k, x in each.items() if k.startswith("eval/")})
        for each in records
    ]
    return [(at, own) for at, own in found if at <= step and own]


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Complete lines; the last one may be truncated."""
    lines = (read_file(path) or b"").split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def mean_loss(
    engine: Engine, batches: Iterable[Batch], *, params: Params | None = None
) -> float:
    """Evaluate on several batches: sum(total) / sum(weight) over all of them.

    Args:
      engine: the engine.
      batches: each as `Engine.evaluate` takes it; at least one.
      params: other parameters, such as an average; None for the engine's.

    Returns:
      The mean loss.
    """
    found = [engine.evaluate(batch, params=params) for batch in batches]
    metrics = jax.device_get(found)
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
