"""What does a worker know of its group, and from where?

Every launcher passes it a `Worker` as JSON, in one environment variable. Nothing else
is guessed from the scheduler's own variables.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.launch.own_files import read_json, write_whole

VARIABLE = "JAXPAR_WORKER"


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files of one host, for mutual TLS.

    Attributes:
      certificate: of this host, signed by the authority.
      key: the certificate's private key.
      authority: the certificate that signed those of all hosts.
    """

    certificate: str
    key: str
    authority: str


@dataclasses.dataclass(frozen=True)
class Worker:
    """The environment of one process of a run.

    Attributes:
      coordinator: host:port of JAX's coordination service, which worker 0 starts; None
        for a single worker.
      processes: workers of the run.
      index: of this one.
      planned: processes at the run's first launch; differs from `processes` if it
        resumes with fewer or more.
      address: of this host, which its services listen on.
      local_devices: CPU devices to make here; None for as many as the mesh needs.
      gpus: this worker's GPUs of the host; None for all.
      tls: certificates for the coordination service; None for none.
      folder: the run's folder.
      attempt: how often the group was started, from 1.
      files: folder of the files that this worker writes for its supervisor.
      start_seconds: time to find the others.
      heartbeat_seconds: silence after which a worker is considered dead.
      lease: number of the supervisor's lease of the run's folder; None for none.
      host: number of its host.
    """

    coordinator: str | None
    processes: int
    index: int
    planned: int
    address: str
    local_devices: int | None
    gpus: tuple[int, ...] | None
    tls: Tls | None
    folder: str
    attempt: int
    files: str
    start_seconds: int = 300
    heartbeat_seconds: int = 30
    lease: int | None = None
    host: int = 0

    @property
    def heartbeat(self) -> Path:
        """The file of its heartbeat."""
        return self._file("heartbeat")

    @property
    def stacks(self) -> Path:
        """The file of its Python stacks, dumped on request."""
        return self._file("stacks.txt")

    @property
    def error(self) -> Path:
        """The file of its fatal error, as JSON."""
        return self._file("error.json")

    @property
    def log(self) -> Path:
        """The file of its output."""
        return self._file("log")

    def _file(self, ending: str) -> Path:
        return Path(self.files, f"worker-{self.index:04d}.{ending}")

    def environment(self) -> dict[str, str]:
        """The environment variable with its JSON."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


def current(environment: Mapping[str, str] = os.environ) -> Worker | None:
    """The environment that a launcher gave this process; None without a launcher.

    Raises:
      ValueError: if the variable is set and is not valid.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return None
    try:
        content: dict[str, Any] = json.loads(text)
        tls, gpus = content.pop("tls"), content.pop("gpus")
        return Worker(
            **content,
            tls=Tls(**tls) if tls else None,
            gpus=None if gpus is None else tuple(gpus),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{VARIABLE} is not a worker environment ({error}): start workers with "
            "`jaxpar launch`, or unset it"
        ) from error


def say_error(worker: Worker, error: str) -> None:
    """Write the error that ends a worker, before it ends."""
    write_whole(worker.error, json.dumps({"error": error}))


def read_error(worker: Worker) -> str | None:
    """A worker's fatal error; None if it wrote none."""
    try:
        found = (read_json(worker.error) or {})["error"]
        return found.encode(errors="replace").decode()
    except (AttributeError, KeyError, TypeError):  # It is JSON of something else.
        return None
