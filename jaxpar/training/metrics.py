"""How does a run go? Its numbers, to the console, to JSONL and to other writers.

The metrics of step n are read only when those of step n + 1 are logged; the device is
already working on that step, so logging never leaves it idle.

Names have the form ``train/loss``: ``train/`` what the step returns, ``eval/`` what was
held out, ``perf/`` rates, times and memory, ``workers/`` the processes beside each
other. Files of before had bare names; they are read under these.
"""

import json
import math
import os
import pathlib
import time
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from rich.console import Console

from jaxpar.launch import own_files
from jaxpar.launch.lease import require_lease
from jaxpar.training.progress_line import ProgressLine
from jaxpar.training.writers import Guarded, MetricsWriter

FILE = "metrics.jsonl"
_RESERVED = ("step", "time")
_NON_FINITE = ("nan", "inf", "-inf")
_OF_WORKERS = ("step_seconds", "data_seconds", "memory_gb")


class MetricsLogger:
    """Writes a run's metrics on process 0; does nothing on other processes.

    ``metrics.jsonl`` gets one line per logged step: a JSON object of ``step``,
    ``time`` (seconds since 1970) and the metrics as floats. JSON has no non-finite
    numbers: they are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which
    `read_metrics` converts back. A terminal shows one live line; any other console gets
    a plain line every 5 seconds and every tenth of the run.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with MetricsLogger(folder, total_steps=2, console=False) as logger:
      ...     for step in (1, 2):
      ...         logger.log(step, {"train/loss": 4.0 / step})
      >>> [record["train/loss"] for record in read_metrics(f"{folder}/metrics.jsonl")]
      [4.0, 2.0]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        total_steps: int | None = None,
        tokens_per_step: int | None = None,
        writers: Sequence[MetricsWriter] | Guarded = (),
        settings: Mapping[str, Any] = MappingProxyType({}),
        console: bool | Console = True,
        append: bool = False,
        resume_at: int | None = None,
    ):
        """Open the files; those of another run are never modified.

        Args:
          folder: where ``metrics.jsonl`` goes; made if missing.
          total_steps: the last step of the run, for the time left; None if unknown.
          tokens_per_step: tokens of a global batch, for tokens/s; None to leave out.
          writers: write the numbers elsewhere, too; closed by `close`. A `Guarded` of
            them, for several loggers, remembers those that have failed.
          settings: of the run, for the writers.
          console: True for standard output, False for none, or a rich console.
          append: continue the file in `folder`, if there is one.
          resume_at: with `append`, the step that the run resumes from: records of later
            steps are dropped, because those steps are repeated. None keeps all.

        Raises:
          FileExistsError: if `folder` holds metrics and `append` is False.
          ValueError: if `resume_at` is given without `append`, or a line to append to
            is not a record.
        """
        if resume_at is not None and not append:
            raise ValueError(
                f"resume_at={resume_at} needs append=True; give both to resume a "
                "run, or neither to start one."
            )
        self._pending: tuple[int, Mapping[str, ArrayLike]] | None = None
        shown = Console() if console is True else console or None
        self._progress = ProgressLine(shown, total_steps, tokens_per_step)
        self._is_open = False
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        path = pathlib.Path(folder, FILE)
        own_files.retried(lambda: path.parent.mkdir(parents=True, exist_ok=True), path)
        require_lease(path)
        _prepare_file(path, append, resume_at)
        self._path = path
        own_files.append(path, "")
        self._is_open = True
        self._writers = writers if isinstance(writers, Guarded) else Guarded(writers)
        place = path.parent
        self._writers.each(lambda each: each.begin(place, settings, resume_at))

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over the last 10 minutes; None before the second step."""
        return self._progress.tokens_per_second

    def log(self, step: int, metrics: Mapping[str, ArrayLike]) -> None:
        """Take a step's metrics, and write those of the step before.

        Args:
          step: their step; metrics of the last logged step join its record.
          metrics: one number each; the call does not wait for arrays still being
            computed.

        Raises:
          ValueError: if a metric is not a single number or is called ``step`` or
            ``time``, or the logger is closed.
        """
        if not self._writes:
            return
        if not self._is_open:
            raise ValueError(
                f"step {step} was logged after close(); log inside the with block."
            )
        for name, value in metrics.items():
            if name in _RESERVED:
                raise ValueError(
                    f"metrics: {name!r} is a field of every record; rename the metric."
                )
            if np.shape(value) != ():
                raise ValueError(
                    f"metrics: {name!r} has shape {np.shape(value)}, but a metric is "
                    "one number; reduce it, or log its elements under separate names."
                )
        if self._pending is not None and self._pending[0] == step:
            metrics = {**self._pending[1], **metrics}
        else:
            self.flush()
        self._pending = (step, dict(metrics))

    def flush(self) -> None:
        """Write the last logged metrics; waits until they are computed."""
        earlier, self._pending = self._pending, None
        if earlier is not None:
            self._write(*earlier)

    def close(self) -> None:
        """Write the last logged metrics and close the files; safe to call twice."""
        try:
            self.flush()
        finally:
            if self._is_open:
                self._progress.close()
                self._say_unwritten()
                self._writers.each(lambda each: each.close())
            self._is_open = False

    def _say_unwritten(self) -> None:
        if own_files.unwritten(self._path):
            own_files.append(self._path, "")
        if lines := own_files.unwritten(self._path):
            warnings.warn(f"{lines} lines of {self._path} are lost", stacklevel=3)

    def _write(self, step: int, metrics: Mapping[str, ArrayLike]) -> None:
        read = jax.device_get(metrics)
        values = {name: float(read[name]) for name in metrics}
        now = time.time()
        require_lease(self._path)
        own_files.append(self._path, _to_line({"step": step, "time": now, **values}))
        self._writers.each(lambda each: each.write(step, now, values))
        if not values or any(not name.startswith("eval/") for name in values):
            self._progress.update(step, values)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``.

    Args:
      path: the file.

    Returns:
      One dict per line: ``step`` as an integer, everything else as floats, under
      today's names. A last line that a crash truncated is dropped, with a warning.

    Raises:
      ValueError: if any other line is not a record.
    """
    return [_to_numbers(record) for _, record in _read_lines(pathlib.Path(path))]


def _to_line(record: Mapping[str, Any]) -> str:
    written = {
        name: value if math.isfinite(value) else str(value)
        for name, value in record.items()
    }
    return json.dumps(written, allow_nan=False) + "\n"


def _to_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        metric_name(name): float(value) if value in _NON_FINITE else value
        for name, value in record.items()
    }


def metric_name(name: str) -> str:
    """The name of a metric as today's logs have it; earlier ones had no prefixes.

    Example:
      >>> metric_name("heldout_loss"), metric_name("train/loss"), metric_name("mine")
      ('eval/loss', 'train/loss', 'train/mine')
    """
    if name in _RESERVED or "/" in name:
        return name
    if name == "heldout_loss":
        return "eval/loss"
    is_of_workers = name.rpartition("_")[0] in _OF_WORKERS
    return f"workers/{name}" if is_of_workers else f"train/{name}"


def _to_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if is_record(record) else None


def is_record(value: Any) -> bool:
    """Whether the value of a line is a record of metrics."""
    return (
        isinstance(value, dict)
        and type(value.get("step")) is int
        and all(map(_is_number, value.values()))
    )


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 2**63
    return type(value) is float or value in _NON_FINITE


def _read_lines(path: pathlib.Path) -> list[tuple[bytes, dict[str, Any]]]:
    """List a file's lines with their records, without a truncated last line."""
    lines = (own_files.read(path) or b"").split(b"\n")
    if not lines[-1]:
        lines.pop()
        is_torn = False
    else:
        is_torn = _to_record(lines[-1]) is None
    if is_torn:
        warnings.warn(
            f"{path}: the last line was truncated and is dropped: {lines.pop()[:80]!r}",
            stacklevel=3,
        )
    read = []
    for number, line in enumerate(lines, start=1):
        record = _to_record(line)
        if record is None:
            raise ValueError(
                f"{path}: line {number} is not a record of metrics: {line[:80]!r}; "
                "repair or remove that line."
            )
        read.append((line, record))
    return read


def _prepare_file(path: pathlib.Path, append: bool, resume_at: int | None) -> None:
    """Keep the records that the run resumes from, or refuse to mix two runs."""
    content = own_files.read(path)
    if not content:
        return
    if not append:
        raise FileExistsError(
            f"folder: '{path.parent}' holds the metrics of another run; give another "
            "folder, or append=True to resume that run."
        )
    kept = b"".join(
        line + b"\n"
        for line, record in _read_lines(path)
        if resume_at is None or record["step"] <= resume_at
    )
    if kept != content:
        own_files.write_whole(path, kept, durable=True)
