"""What does a host start: which workers, on which devices?"""

import dataclasses
import re
from pathlib import Path

from jaxpar.launch.limits import Limits
from jaxpar.launch.rendezvous import Attempt
from jaxpar.launch.security import read_tls
from jaxpar.launch.worker_environment import Tls, Worker


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a supervisor starts, and how it watches it.

    Attributes:
      command: the script and its flags.
      folder: the run's.
      processes: workers on this host.
      host: this host's number; 0 is the head.
      hosts: how many there are.
      least_hosts: hosts that suffice to continue if others do not appear.
      address: of this host.
      port: of the coordination service; None for any free one.
      local_devices: CPU devices of each worker; None for as many as the mesh needs.
      gpus: of this host, divided among its workers; empty for none.
      tls: certificates of this host; None for none.
      own_tls: whether the head makes certificates, as all workers are on its host.
      limits: of each phase.
      restarts: restarts that are tried within an hour.
      heartbeat_seconds: see `Worker`.
      lease: see `Worker`.
    """

    command: tuple[str, ...]
    folder: Path
    processes: int = 1
    host: int = 0
    hosts: int = 1
    least_hosts: int | None = None
    address: str = "127.0.0.1"
    port: int | None = None
    local_devices: int | None = None
    gpus: tuple[int, ...] = ()
    tls: Tls | None = None
    own_tls: bool = False
    limits: Limits = dataclasses.field(default_factory=Limits)
    restarts: int = 10
    heartbeat_seconds: int = 30
    lease: int | None = None


def workers_of(launch: Launch, attempt: Attempt) -> list[Worker]:
    """The environments of a host's workers in an attempt."""
    first = attempt.first_worker(launch.host)
    each = len(launch.gpus) // launch.processes
    own = read_tls(Path(attempt.tls)) if attempt.tls else None
    return [
        Worker(
            coordinator=attempt.coordinator,
            processes=sum(attempt.processes.values()),
            index=first + i,
            planned=attempt.planned,
            address=launch.address,
            local_devices=launch.local_devices,
            gpus=launch.gpus[i * each : (i + 1) * each] or None,
            tls=launch.tls or own,
            folder=str(launch.folder),
            attempt=attempt.number,
            files=str(launch.folder / "launch" / f"{attempt.number:04d}"),
            # Below the watchdog's limit, so that a worker can report what it waited
            # for.
            start_seconds=int(_JOIN_SHARE * (launch.limits.start or _ANY_SECONDS)),
            heartbeat_seconds=launch.heartbeat_seconds,
            lease=launch.lease,
            host=launch.host,
        )
        for i in range(launch.processes)
    ]


def host_gpus() -> tuple[int, ...]:
    """The numbers of this host's NVIDIA GPUs."""
    found = (
        re.fullmatch(r"nvidia(\d+)", path.name) for path in _DEVICES.glob("nvidia*")
    )
    return tuple(sorted(int(match[1]) for match in found if match))


_DEVICES = Path("/dev")
_JOIN_SHARE = 0.75
_ANY_SECONDS = 3600
