"""How does Ray start a run? It places one supervisor on each host, and no more.

Ray chooses the hosts, reserves their CPUs and GPUs, and starts a supervisor again when
its host or Ray's own process is lost. All else is as under Slurm or MPI: supervisors
coordinate through files in the run's folder, and restart workers themselves.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from jaxpar.launch.exit_codes import GAVE_UP, STOPPED
from jaxpar.launch.group import tail
from jaxpar.launch.ray_cluster import connected
from jaxpar.launch.rendezvous import POLL_SECONDS
from jaxpar.launch.report import Report
from jaxpar.launch.scheduler import Place
from jaxpar.launch.start import Launch, host_gpus
from jaxpar.launch.stop_signals import STOPPING, listen

VARIABLE = "JAXPAR_RAY_PLACE"
"""Environment variable of a supervisor that Ray has placed."""

_END_SECONDS = 10.0
"""Time for the first host's supervisor to end, after that of another host."""


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
    """Start a supervisor on each host, and wait for the run's end.

    Args:
      command: of a supervisor, after Python.
      launch: what it starts, as checked on this host.
      hosts: how many, and where.

    Returns:
      The run's exit code, from a supervisor; `GAVE_UP` if Ray lost one too often.

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
    # Of this launch alone: another launcher of the run may be at work.
    session = folder / f"ray-{secrets.token_hex(4)}"
    session.mkdir(mode=0o700)
    try:
        with connected(hosts.cluster, launch.processes, insecure=hosts.insecure) as ray:
            signals.listen()  # Ray has replaced the handlers.
            tasks = _submit(ray, command, launch, hosts, session)
            signals.is_running = True
            return _follow(ray, tasks, session, signals)
    finally:
        shutil.rmtree(session, ignore_errors=True)


class _Signals:
    """Notices signals; before supervisors run, they end the launcher."""

    def __init__(self):
        self.asked: int | None = None
        self.is_running = False
        self.listen()

    def listen(self) -> None:
        for number in STOPPING:
            listen(number, self._notice)

    def _notice(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked == signal.SIGINT:
            raise SystemExit(128 + number)  # The second: supervisors end with Ray's.
        self.asked = number
        if not self.is_running:
            raise SystemExit(STOPPED)


def _follow(ray: Any, tasks: list[Any], session: Path, signals: _Signals) -> int:
    """Show what the first host's supervisor prints until the run is over."""
    run, log = session.parent.parent, _log(session, host=0)
    log.touch()
    try:
        with Report(run, host=0).following(log):
            ended: list[Any] = []
            while not ended:
                ended, _ = ray.wait(tasks, timeout=POLL_SECONDS)
                if signals.asked is not None:
                    _stop_file(session).touch()
            code = ray.get(ended[0])
            # It ends with the others, unless one of them could not begin.
            first, _ = ray.wait(tasks[:1], timeout=_END_SECONDS)
        if first:
            return ray.get(first[0])
        host = tasks.index(ended[0])
        said = "\n".join(["", *tail(_log(session, host))])
        why = f"the supervisor of host {host} ended with code {code}:{said}"
    except ray.exceptions.RayError as error:
        code, why = GAVE_UP, f"Ray gave up a host: {getattr(error, 'cause', error)}"
    Report(run, host=0).over(code, why)
    return code


def _submit(
    ray: Any, command: Sequence[str], launch: Launch, hosts: Hosts, session: Path
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
            retry_exceptions=[ChildProcessError],
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=host
            ),
        ).remote(list(command), host, hosts.number, given, Path.cwd(), session)
        for host in range(hosts.number)
    ]


def _run_supervisor(
    command: list[str],
    host: int,
    hosts: int,
    given: dict[str, str],
    working_folder: Path,
    session: Path,
) -> int:
    """Be the task of a host: run its supervisor, and pass on the request to stop.

    Raises:
      FileNotFoundError: if a folder of the launcher's is not on this host.
      ChildProcessError: if the supervisor was killed; Ray starts the task again.
    """
    for folder in (session, working_folder):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{str(folder)!r} is not on {socket.gethostname()}: all hosts must "
                "mount --out and the launcher's working folder, at the same paths"
            )
    place = dataclasses.asdict(
        Place(host, hosts, _own_address() if hosts > 1 else None)
    )
    with _log(session, host).open("a") as output:
        if output.tell():
            with contextlib.redirect_stdout(output):
                what = f"Ray has started the supervisor of host {host} again"
                text = f"{what}: it, or the process of Ray that ran it, was killed"
                Report(session.parent.parent, host).say(text)
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
        if not is_asked and _stop_file(session).exists():
            process.send_signal(signal.SIGTERM)
            is_asked = True
        time.sleep(POLL_SECONDS)
    code = process.returncode
    if is_asked and code == -signal.SIGTERM:  # It had not begun to listen.
        return STOPPED
    if code < 0:
        raise ChildProcessError(
            f"the supervisor of host {host} ({socket.gethostname()}) was killed by "
            f"{signal.Signals(-code).name}"
        )
    return code


def _own_address() -> str:
    """This host's address in the cluster."""
    from ray.util import (  # noqa: PLC0415 # pyright: ignore - an extra
        get_node_ip_address,
    )

    return get_node_ip_address()


def _log(session: Path, host: int) -> Path:
    """The file of what a host's supervisor prints."""
    return session / f"host-{host:04d}.log"


def _stop_file(session: Path) -> Path:
    """The file by which a launcher requests that supervisors save and end."""
    return session / "stop"
