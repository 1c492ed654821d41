"""How does a run go? Its numbers, to the console, to JSONL and to TensorBoard.

The metrics of step n are read only when those of step n + 1 are logged; the device is
already working on that step, so logging never leaves it idle.
"""

import datetime
import importlib
import json
import math
import os
import pathlib
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from jaxpar.launch.lease import require_lease

_FILE = "metrics.jsonl"
_RESERVED = ("step", "time")
_NON_FINITE = ("nan", "inf", "-inf")
_RATE_WINDOW_S = 600.0
_REDRAW_S = 0.1
_PLAIN_LINE_S = 5.0
_EVENTS_FLUSH_S = 10


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
      ...         logger.log(step, {"loss": 4.0 / step})
      >>> [record["loss"] for record in read_metrics(f"{folder}/metrics.jsonl")]
      [4.0, 2.0]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        total_steps: int | None = None,
        tokens_per_step: int | None = None,
        tensorboard: bool = False,
        console: bool | Console = True,
        append: bool = False,
        resume_at: int | None = None,
    ):
        """Open the files; those of another run are never modified.

        Args:
          folder: where ``metrics.jsonl`` (and ``tensorboard/``) go; made if missing.
          total_steps: the last step of the run, for the time left; None if unknown.
          tokens_per_step: tokens of a global batch, for tokens/s; None to leave out.
          tensorboard: also write TensorBoard event files, complete after `close`.
          console: True for standard output, False for none, or a rich console.
          append: continue the file in `folder`, if there is one.
          resume_at: with `append`, the step that the run resumes from: records of later
            steps are dropped, because those steps are repeated. None keeps all.

        Raises:
          FileExistsError: if `folder` holds metrics and `append` is False.
          ModuleNotFoundError: if `tensorboard` is asked for and tensorboardX missing.
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
        self._progress = _Progress(shown, total_steps, tokens_per_step)
        self._file = self._events = None
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        events = _import_tensorboard() if tensorboard else None
        path = pathlib.Path(folder, _FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        require_lease(path)
        _prepare_file(path, append, resume_at)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        if events is not None:
            self._events = events.SummaryWriter(
                str(path.parent / "tensorboard"),
                purge_step=None if resume_at is None else resume_at + 1,
                flush_secs=_EVENTS_FLUSH_S,
                # Names have a resolution of one second: a quick resume would overwrite.
                filename_suffix=f".{time.time_ns()}",
            )

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
        if self._file is None:
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
            if self._file is not None:
                self._progress.close()
            if self._events is not None:
                self._events.close()
            if self._file is not None:
                self._file.close()
            self._file = self._events = None

    def _write(self, step: int, metrics: Mapping[str, ArrayLike]) -> None:
        assert self._file is not None
        read = jax.device_get(metrics)
        values = {name: float(read[name]) for name in metrics}
        now = time.time()
        require_lease(self._path)
        self._file.write(_to_line({"step": step, "time": now, **values}))
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step, walltime=now)
        self._progress.update(step, values)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``.

    Args:
      path: the file.

    Returns:
      One dict per line: ``step`` as an integer, everything else as floats. A last
      line that a crash truncated is dropped, with a warning.

    Raises:
      ValueError: if any other line is not a record.
    """
    return [_to_numbers(record) for _, record in _read_lines(pathlib.Path(path))]


class _Progress:
    """How far a run is: a bar that is redrawn, or plain lines at intervals."""

    def __init__(
        self,
        console: Console | None,
        total_steps: int | None,
        tokens_per_step: int | None,
    ):
        self._console, self._tokens_per_step = console, tokens_per_step
        self._draws_bar = console is not None and console.is_interactive
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(20)] if total_steps else []),
            console=console,
            auto_refresh=False,
            speed_estimate_period=_RATE_WINDOW_S,
            get_time=lambda: time.monotonic(),
            disable=not self._draws_bar,
        )
        self._bar.add_task("", total=total_steps)
        (self._task,) = self._bar.tasks
        self._values: dict[str, float] = {}
        self._is_shown, self._shown_at, self._shown_tenths = True, -math.inf, 0

    @property
    def tokens_per_second(self) -> float | None:
        if self._task.speed is None or self._tokens_per_step is None:
            return None
        return self._task.speed * self._tokens_per_step

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's numbers; show them if it is time."""
        self._values.update(values)
        if step < self._task.completed:
            self._bar.reset(self._task.id)
        self._bar.update(self._task.id, completed=step)
        self._is_shown = False
        since = time.monotonic() - self._shown_at
        tenths = int(self._task.percentage // 10) if self._task.total else 0
        if self._draws_bar:
            is_due = since >= _REDRAW_S
        else:
            is_due = since >= _PLAIN_LINE_S or tenths > self._shown_tenths
        if is_due:
            self._shown_tenths = tenths
            self._show()

    def close(self) -> None:
        """Show the last step's numbers, and end the line."""
        if not self._is_shown:
            self._show()
        if self._draws_bar:
            self._bar.stop()

    def _show(self) -> None:
        if self._draws_bar:
            self._bar.start()
            self._bar.update(self._task.id, description=str(self), refresh=True)
        elif self._console is not None:
            self._console.print(str(self), soft_wrap=True, markup=False)
        self._is_shown, self._shown_at = True, time.monotonic()

    def __str__(self) -> str:
        total = "" if self._task.total is None else f"/{self._task.total:.0f}"
        parts = [f"step {self._task.completed:.0f}{total}"]
        for name, form in (
            ("loss", "loss {:.4g}"),
            ("grad_norm", "grad norm {:.3g}"),
            ("learning_rate", "lr {:.2e}"),
        ):
            if name in self._values:
                parts.append(form.format(self._values[name]))
        if self.tokens_per_second is not None:
            parts.append(f"{_shorten(self.tokens_per_second)} tokens/s")
        if self._task.speed is not None and self._task.time_remaining is not None:
            left = datetime.timedelta(seconds=round(self._task.time_remaining))
            parts.append(f"{left} left")
        return "  ".join(parts)


def _shorten(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _import_tensorboard() -> Any:
    try:
        return importlib.import_module("tensorboardX")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tensorboard=True needs tensorboardX, which is not installed; run pip "
            "install 'jaxpar[tensorboard]', or drop tensorboard=True.",
            name=error.name,
        ) from error


def _to_line(record: Mapping[str, Any]) -> str:
    written = {
        name: value if math.isfinite(value) else str(value)
        for name, value in record.items()
    }
    return json.dumps(written, allow_nan=False) + "\n"


def _to_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: float(value) if value in _NON_FINITE else value
        for name, value in record.items()
    }


def _to_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_record else None


def _read_lines(path: pathlib.Path) -> list[tuple[bytes, dict[str, Any]]]:
    """List a file's lines with their records, without a truncated last line."""
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()
        is_torn = False
    else:
        is_torn = _to_record(lines[-1]) is None
    if is_torn:
        warnings.warn(
            f"{path}: the last line was truncated and is dropped: {lines.pop()!r}",
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
    if not path.exists() or not path.stat().st_size:
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
    if kept == path.read_bytes():
        return
    # A crash while writing must leave either the old file or the new one.
    new = path.with_suffix(".tmp")
    with new.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
