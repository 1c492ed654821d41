"""Where else do a run's numbers go: TensorBoard, Weights & Biases, MLflow, your own.

``metrics.jsonl`` is always written. A writer that fails is left out with a warning, and
the run goes on.
"""

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxpar.launch.extras import import_extra
from jaxpar.launch.own_files import read, write_whole
from jaxpar.training.options import options_of

_FLUSH_SECONDS = 10
_SEND_SECONDS = 1.0
_MOST_AT_ONCE = 900
"""MLflow takes 1,000 numbers in a request."""


@runtime_checkable
class MetricsWriter(Protocol):
    """Takes the numbers of a run, on process 0."""

    def begin(
        self, folder: Path, settings: Mapping[str, Any], resume_at: int | None
    ) -> None:
        """Open what is written to; called again after `close` when a run rolls back.

        Args:
          folder: the run's.
          settings: its config, as ``run.json`` has it.
          resume_at: the step that it goes on from, where later steps of an earlier
            start are repeated; 0 for a new run, None if it is not known.
        """
        ...

    def write(self, step: int, seconds: float, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step.

        Args:
          step: the step.
          seconds: when it was read, since 1970.
          numbers: name -> value, as in ``metrics.jsonl``.
        """
        ...

    def close(self) -> None:
        """Write all that is left."""
        ...


class TensorBoard:
    """Writes event files below ``tensorboard/`` in the run's folder.

    Raises:
      ModuleNotFoundError: if tensorboardX is missing.
    """

    def __init__(self):
        self._package = import_extra("tensorboardX", "TensorBoard (--tensorboard)")
        self._events: Any = None

    def begin(
        self, folder: Path, settings: Mapping[str, Any], resume_at: int | None
    ) -> None:
        """Open a file; TensorBoard drops later steps of earlier ones."""
        del settings
        self._events = self._package.SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=None if resume_at is None else resume_at + 1,
            flush_secs=_FLUSH_SECONDS,
            # Names have a resolution of one second: a quick resume would overwrite.
            filename_suffix=f".{time.time_ns()}",
        )

    def write(self, step: int, seconds: float, numbers: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step, walltime=seconds)

    def close(self) -> None:
        """Complete the file."""
        self._events.close()


class Wandb:
    """Writes to Weights & Biases; a run that goes on is the same one there.

    Args:
      project: of the runs.
      **options: of ``wandb.init``, such as ``entity="team"`` or ``mode="offline"``.

    Raises:
      ModuleNotFoundError: if wandb is missing.
    """

    def __init__(self, project: str = "jaxpar", **options: Any):
        self._package = import_extra("wandb", "Weights & Biases (--writers wandb)")
        self._options = {"project": project, "resume": "allow"} | options
        self._run: Any = None

    def begin(
        self, folder: Path, settings: Mapping[str, Any], resume_at: int | None
    ) -> None:
        """Start or continue the run; its id is in ``wandb.id``."""
        del resume_at
        own = {"name": folder.resolve().name, "dir": str(folder), "config": settings}
        quiet = self._package.Settings(console="off")
        identity = {"id": _own_id(folder / "wandb.id"), "settings": quiet}
        self._run = self._package.init(**{**own, **identity, **self._options})
        # Its own count of calls can't go back to a step that is repeated.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, seconds: float, numbers: Mapping[str, float]) -> None:
        """Log the numbers."""
        self._run.log({**numbers, "step": step, "_timestamp": seconds})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """Writes to MLflow; a run that goes on is the same one there.

    Args:
      experiment: of the runs.
      uri: of the server or the store; None for MLflow's own setting
        (``MLFLOW_TRACKING_URI``).

    Raises:
      ModuleNotFoundError: if mlflow is missing.
    """

    def __init__(self, experiment: str = "jaxpar", uri: str | None = None):
        self._package = import_extra("mlflow", "MLflow (--writers mlflow)")
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._metric: Any = None
        self._id = ""
        self._unsent: list[Any] = []
        self._sent = 0.0

    def begin(
        self, folder: Path, settings: Mapping[str, Any], resume_at: int | None
    ) -> None:
        """Start or continue the run; its id is in ``mlflow.id``."""
        del resume_at
        self._client = self._package.MlflowClient(self._uri)
        self._metric = import_extra("mlflow.entities", "MLflow").Metric
        file = folder / "mlflow.id"
        if known := read(file):
            self._id = known.decode().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(self._experiment)
        )
        run = self._client.create_run(experiment, run_name=folder.resolve().name)
        self._id = run.info.run_id
        for name, value in settings.items():
            self._client.log_param(self._id, name, value)
        write_whole(file, self._id)

    def write(self, step: int, seconds: float, numbers: Mapping[str, float]) -> None:
        """Take the numbers; they are sent once a second."""
        at = round(1000 * seconds)
        self._unsent += [self._metric(k, v, at, step) for k, v in numbers.items()]
        if time.monotonic() - self._sent > _SEND_SECONDS:
            self._send()

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._send()
        self._client.set_terminated(self._id)

    def _send(self) -> None:
        while self._unsent:
            part, self._unsent = (
                self._unsent[:_MOST_AT_ONCE],
                self._unsent[_MOST_AT_ONCE:],
            )
            self._client.log_batch(self._id, metrics=part)
        self._sent = time.monotonic()


NAMED: dict[str, Callable[[], MetricsWriter]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}
"""Name, for flags -> the writer with its defaults."""


def writers_of(config: Any) -> tuple[MetricsWriter, ...]:
    """Make the writers that a config names.

    Args:
      config: with the fields of `StartOptions`, or without.

    Returns:
      Those of ``tensorboard`` and ``writers``, in order.

    Raises:
      ValueError: if there is no such writer.
      ModuleNotFoundError: if its package is missing.
    """
    options = options_of(config)
    names = [*["tensorboard"] * options.tensorboard, *options.writers]
    wrong = [name for name in names if name not in NAMED]
    if wrong:
        raise ValueError(
            f"writers={wrong[0]!r} is not a writer; the names are {', '.join(NAMED)}."
        )
    return tuple(NAMED[name]() for name in dict.fromkeys(names))


class Guarded:
    """Calls writers; one that fails is left out from then on, with a warning.

    Args:
      writers: the writers.
    """

    def __init__(self, writers: Sequence[MetricsWriter]):
        self._writers = list(writers)

    def each(self, call: Callable[[Any], None]) -> None:
        """Call a function of each writer that has not failed."""
        for writer in list(self._writers):
            try:
                call(writer)
            # Somebody else's program: it may raise anything, and a run of days must
            # not end by it.
            except Exception as error:  # noqa: BLE001
                self._writers.remove(writer)
                with contextlib.suppress(Exception):
                    writer.close()
                warnings.warn(
                    f"writers: {type(writer).__name__} failed ({error}); the run goes "
                    "on without it, and metrics.jsonl has all numbers.",
                    stacklevel=2,
                )


def _own_id(file: Path) -> str:
    """The id in a file; made at the first start."""
    known = read(file)
    if not known:
        write_whole(file, known := uuid.uuid4().hex.encode())
    return known.decode().strip()
