"""How does Ray start a run? It places one supervisor on each host, and no more.

Ray chooses the hosts, reserves their CPUs and GPUs, and starts a supervisor again when
its host or Ray's own process is lost. All else is as under Slurm or MPI: supervisors
coordinate through files in the run's folder, and restart workers themselves.
"""

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from jaxpar.exit_codes import GAVE_UP, STOPPED
from jaxpar.launch.ray_cluster import connected
from jaxpar.launch.rendezvous import POLL_SECONDS
from jaxpar.launch.report import Report
from jaxpar.launch.scheduler import Place
from jaxpar.launch.start import Launch, host_gpus

VARIABLE = "JAXPAR_RAY_PLACE"
"""Environment variable of a supervisor that Ray has placed."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """What is requested from Ray.

    Attributes:
      number: of hosts, each with one supervisor.
      cluster: of Ray, as ray.init takes it; None for one on this host alone.
      use_gpu: a GPU for each worker; otherwise they use the CPU.
      insecure: use a cluster that requires no token.
    """

    number: int
    cluster: str | None
    use_gpu: bool
    insecure: bool


def ray_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of a supervisor that Ray started; None outside of one."""
    if VARIABLE not in environment:
        return None
    return Place(**json.loads(environment[VARIABLE]))


def workers_per_host(
    processes: int | None, *, cluster: str | None, use_gpu: bool
) -> int:
    """Check how many workers each host is to have; the default if it is None.

    Raises:
      ValueError: if the hosts can't have so many; the message names the flag.
    """
    gpus = len(host_gpus())
    if processes is None and use_gpu and cluster is not None:
        raise ValueError(
            "--processes: state how many GPUs to reserve on each host of the cluster"
        )
    if processes is None:
        processes = max(gpus, 1) if use_gpu else 1
    if processes < 1:
        raise ValueError(f"--processes {processes}: must be at least 1")
    if use_gpu and cluster is None and processes > gpus:
        raise ValueError(
            f"--use-gpu: {processes} workers need a GPU each, and this host has "
            f"{gpus}; choose fewer (--processes), or name a cluster of Ray (--cluster)"
        )
    return processes


def start_on_ray(command: Sequence[str], launch: Launch, hosts: Hosts) -> int:
    """Start a supervisor on each host, and wait for their end.

    Args:
      command: of a supervisor, after Python.
      launch: what it starts, as checked on this host.
      hosts: how many, and where.

    Returns:
      The exit code of the first host's supervisor; `GAVE_UP` if Ray lost one too often.

    Raises:
      ValueError: if the hosts can't be had; the message names the flag.
      ModuleNotFoundError: if Ray is not installed.
      RuntimeError: if Ray would listen where others can connect.
    """
    if hosts.cluster is None and hosts.number > 1:
        raise ValueError(
            f"--hosts {hosts.number}: without a cluster of Ray (--cluster ADDRESS) "
            "there is only this host"
        )
    signals = _Signals()
    folder = launch.folder.absolute() / "launch"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stop = folder / f"ray-stop-{secrets.token_hex(4)}"
    log = folder / "host-0000.log"
    log.write_bytes(b"")
    with connected(hosts.cluster, launch.processes, insecure=hosts.insecure) as ray:
        signals.listen()  # Ray has replaced the handlers.
        tasks = _submit(ray, command, launch, hosts, stop)
        try:
            with Report(launch.folder, host=0).following(log):
                while len(ray.wait(tasks, num_returns=len(tasks), timeout=0.0)[1]):
                    if signals.asked:
                        stop.touch()
                    time.sleep(POLL_SECONDS)
            return ray.get(tasks)[0]
        except ray.exceptions.RayError as error:
            print(f"launch: Ray gave up a host: {error}", file=sys.stderr, flush=True)
            return GAVE_UP
        finally:
            stop.unlink(missing_ok=True)


class _Signals:
    """Notices signals; before a supervisor runs, they end the launcher."""

    def __init__(self):
        self.asked, self._is_running = False, False
        self._set()

    def listen(self) -> None:
        self._is_running = True
        self._set()

    def _set(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._notice)

    def _notice(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked:
            raise SystemExit(128 + number)  # The second: supervisors end with Ray's.
        self.asked = True
        if not self._is_running:
            raise SystemExit(STOPPED)


def _submit(
    ray: Any, command: Sequence[str], launch: Launch, hosts: Hosts, stop: Path
) -> list[Any]:
    """Reserve the hosts, and start a task on each."""
    from ray.util.scheduling_strategies import (  # noqa: PLC0415 # pyright: ignore - an extra
        PlacementGroupSchedulingStrategy,
    )

    needs = {"CPU": float(launch.processes)}
    if hosts.use_gpu:
        needs["GPU"] = float(launch.processes)
    group = ray.util.placement_group([needs] * hosts.number, strategy="STRICT_SPREAD")
    seconds = launch.limits.rendezvous
    try:
        ray.get(group.ready(), timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise ValueError(
            f"--hosts {hosts.number} --processes {launch.processes}: Ray had no such "
            f"hosts within {seconds:g} s; each needs {needs}, and the cluster has "
            f"{ray.available_resources()} free"
        ) from None
    given = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    if not hosts.use_gpu:
        given["JAX_PLATFORMS"] = "cpu"
    task = ray.remote(_run_supervisor)
    return [
        task.options(
            num_cpus=launch.processes,
            num_gpus=launch.processes if hosts.use_gpu else 0,
            max_retries=launch.restarts,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=host
            ),
        ).remote(list(command), host, hosts.number, given, str(Path.cwd()), str(stop))
        for host in range(hosts.number)
    ]


def _run_supervisor(
    command: list[str],
    host: int,
    hosts: int,
    given: dict[str, str],
    working_folder: str,
    stop: str,
) -> int:
    """Be the task of a host: run its supervisor, and pass on the request to stop."""
    import ray  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - an extra

    place = {
        "host": host,
        "hosts": hosts,
        "name": ray.util.get_node_ip_address() if hosts > 1 else None,
    }
    log = Path(stop).with_name(f"host-{host:04d}.log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=working_folder,
            env={**os.environ, **given, VARIABLE: json.dumps(place)},
            start_new_session=True,
        )
    is_asked = False
    while process.poll() is None:
        if not is_asked and Path(stop).exists():
            process.send_signal(signal.SIGTERM)
            is_asked = True
        time.sleep(POLL_SECONDS)
    return process.returncode
