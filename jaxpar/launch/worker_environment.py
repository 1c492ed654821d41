"""What does a worker know of the group that it is of? All of it, and from one place.

Whatever starts a worker hands it a `Worker`, in one environment variable. Nothing else
is guessed from the scheduler's own variables.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "JAXPAR_WORKER"


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files of one host, for mutual TLS.

    Attributes:
      certificate: of this host, signed by the authority.
      key: the certificate's private key.
      authority: the certificate of who signed the certificates of all hosts.
    """

    certificate: str
    key: str
    authority: str


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process of a run.

    Attributes:
      coordinator: host:port of JAX's coordination service, which worker 0 starts; None
        where this worker is alone.
      processes: of the run.
      index: of this one.
      planned: processes that the run was planned for; others than `processes` where
        it goes on with fewer or more.
      address: of this host, which its services listen on.
      local_devices: CPU devices to make here; None for as many as the mesh needs.
      gpus: which of the host's GPUs are this worker's; None for all.
      tls: certificates for the coordination service; None for none.
      folder: the run's folder.
      attempt: how often the group was started, from 1.
      files: folder of what this worker tells its supervisor.
      start_seconds: to find the others in.
      heartbeat_seconds: without a sign of a worker, after which it is taken for dead.
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

    @property
    def heartbeat(self) -> Path:
        """The file of its pulse."""
        return self._file("pulse")

    @property
    def stacks(self) -> Path:
        """Where its Python stacks go when it is asked for them."""
        return self._file("stacks.txt")

    @property
    def error(self) -> Path:
        """What ended it, as JSON."""
        return self._file("error.json")

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._file("log")

    def _file(self, ending: str) -> Path:
        return Path(self.files, f"worker-{self.index:04d}.{ending}")

    def environment(self) -> dict[str, str]:
        """The variable that hands it over."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


def current(environment: Mapping[str, str] = os.environ) -> Worker | None:
    """What this process was started as; None if by no launcher.

    Raises:
      ValueError: if the variable is there and is no contract.
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
            f"{VARIABLE} is no contract of a worker ({error}): start workers by "
            "`jaxpar launch`, or unset it"
        ) from error


def say_error(worker: Worker, error: str) -> None:
    """Write down what ends a worker, before it ends."""
    worker.error.write_text(json.dumps({"error": error}), encoding="utf-8")


def read_error(worker: Worker) -> str | None:
    """What a worker said that ended it; None if it said nothing."""
    try:
        return json.loads(worker.error.read_text(encoding="utf-8"))["error"]
    except (FileNotFoundError, json.JSONDecodeError):
        return None
