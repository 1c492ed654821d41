"""``jaxpar launch``: starts a run's processes and restarts them on failures."""

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from jaxpar.cli.certs import Certs
from jaxpar.cli.hand_over import OF_SCRIPTS, hand_over, this_command
from jaxpar.launch.extras import pip_install
from jaxpar.launch.group import variables, worker_command
from jaxpar.launch.k8s import K8s, write_manifest
from jaxpar.launch.limits import Limits
from jaxpar.launch.ray_hosts import Hosts, ray_place, start_on_ray, workers_per_host
from jaxpar.launch.rendezvous import Attempt
from jaxpar.launch.sbatch import Batch, write_script
from jaxpar.launch.scheduler import (
    Place,
    has_slurm_job,
    mpi_place,
    require_program,
    slurm_place,
)
from jaxpar.launch.security import is_loopback, read_tls, require_secure
from jaxpar.launch.start import Launch, host_gpus, workers_of
from jaxpar.launch.supervisor import supervise
from jaxpar.launch.worker import end_with_parent
from jaxpar.launch.worker_environment import VARIABLE

Script = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SCRIPT")]


@dataclasses.dataclass(frozen=True)
class Supervised:
    """What each host's supervisor starts, and how it watches it.

    Attributes:
      script: the script that every worker runs; its own flags follow after ``--``. It
        also receives ``--out``.
      out: the run's folder; runs/ and the script's name if not given. All hosts must
        mount it.
      processes: workers on this host; if not given, one for each GPU, else one.
      gpus: the host's GPUs to use, by number; if not given, all.
      local_devices: CPU devices of each worker; if not given, as the mesh needs.
      address: of this host, where the other hosts reach it. Any but a loopback address
        needs --tls or --insecure.
      port: of the coordinator; if not given, a free one.
      tls: folder of this host's certificates, or of all hosts', by `jaxpar launch
        certs`. TLS covers JAX's coordinator, not what workers exchange in collectives:
        where others can listen, join the hosts by WireGuard or the cluster's own
        fabric. Workers of one host have TLS by themselves.
      insecure: listen without certificates, also on an address that others reach.
      limits: how long a worker may be in one phase before the group is restarted.
      restarts: restarts of the group within an hour, at most. Each one comes back once
        a later step was saved.
      heartbeat: seconds of silence after which JAX considers a worker dead.
      dry_run: print what would be started, and start nothing.
      flags: of the script.
    """

    script: Script
    out: Path | None = None
    processes: int | None = None
    gpus: tuple[int, ...] = ()
    local_devices: int | None = None
    address: str = "127.0.0.1"
    port: int | None = None
    tls: Path | None = None
    insecure: bool = False
    limits: Limits = dataclasses.field(default_factory=Limits)
    restarts: int = 10
    heartbeat: int = 30
    dry_run: bool = False
    flags: tyro.conf.Suppress[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True)
class Local(Supervised):
    """Start a run's workers on this host, and restart them on failures.

    Start it again to resume the run, with fewer or more workers if needed: the global
    batch stays the same. On several hosts without a scheduler, start it on each.

    Attributes:
      hosts: number of hosts.
      host: the number of this one, from 0.
      least_hosts: continue with this many if others do not appear, or have failed
        three times within a day and are left out; all if not given.
    """

    hosts: int = 1
    host: int = 0
    least_hosts: int | None = None


@dataclasses.dataclass(frozen=True)
class Slurm(Supervised):
    """Start a run in a Slurm allocation, or write a batch script for one.

    Within an srun task this is the supervisor of its node; within an allocation it
    starts such a task on each node.

    Attributes:
      script_out: write a script for sbatch into this file, and start nothing.
      batch: the resources that the script requests.
    """

    script_out: Annotated[Path | None, tyro.conf.arg(name="sbatch")] = None
    # Its tuples are flags that may be given several times.
    batch: tyro.conf.UseAppendAction[Batch] = dataclasses.field(
        default_factory=lambda: Batch("jaxpar")
    )


@dataclasses.dataclass(frozen=True)
class Mpi(Supervised):
    """Start a run's supervisors with mpiexec, one per host.

    Within a process that mpiexec started, this is a supervisor.

    Attributes:
      hosts: processes that mpiexec starts.
      mpiexec: more flags for it, such as "-f hosts.txt".
    """

    hosts: int = 1
    mpiexec: str = ""


@dataclasses.dataclass(frozen=True)
class Ray(Supervised):
    """Start a run's supervisors with Ray, one per host.

    Without --cluster, Ray is started on this host alone for the run. Start it again to
    resume the run.

    Attributes:
      hosts: hosts that Ray chooses.
      cluster: address of a running cluster, as ray.init takes it. Its hosts all need
        this Python, the script and --out, at the same paths.
      use_gpu: reserve a GPU for each worker; otherwise workers use the CPU, and a
        host has one if --processes is not given.
    """

    hosts: int = 1
    cluster: str | None = None
    use_gpu: bool = False


@dataclasses.dataclass(frozen=True)
class K8sManifest(K8s):
    """Write a manifest that starts a run in a Kubernetes cluster.

    Nothing is started: kubectl apply does that. The image needs jaxpar and the script.

    Attributes:
      dry_run: print the manifest, and write no file.
    """

    script: Script
    dry_run: bool = False
    flags: tyro.conf.Suppress[tuple[str, ...]] = ()


Commands = (
    Annotated[Local, tyro.conf.subcommand("local")]
    | Annotated[Slurm, tyro.conf.subcommand("slurm")]
    | Annotated[Mpi, tyro.conf.subcommand("mpi")]
    | Annotated[Ray, tyro.conf.subcommand("ray")]
    | Annotated[K8sManifest, tyro.conf.subcommand("k8s")]
    | Annotated[Certs, tyro.conf.subcommand("certs")]
)


@dataclasses.dataclass(frozen=True)
class StartRun:
    """Start a run's processes on one host or many, and restart them on failures."""

    where: tyro.conf.OmitSubcommandPrefixes[Commands]

    def with_flags(self, flags: tuple[str, ...]) -> "StartRun":
        """The command with the flags after ``--``."""
        if not isinstance(self.where, Supervised | K8sManifest):
            raise ValueError("launch certs takes no flags after --.")
        return StartRun(dataclasses.replace(self.where, flags=flags))


def start_run(args: StartRun) -> None:
    """Start the run; the process ends with the run's code."""
    where = args.where
    if isinstance(where, Certs):
        where.make()
    elif isinstance(where, K8sManifest):
        write_manifest(
            dataclasses.replace(where, file=None) if where.dry_run else where
        )
    elif isinstance(where, Ray):
        _start_ray(where)
    elif isinstance(where, Slurm):
        _start_slurm(where)
    elif isinstance(where, Mpi):
        _start_mpi(where)
    else:
        _start_here(where, where.host, where.hosts, where.least_hosts)


def _start_here(
    args: Supervised, host: int, hosts: int, least_hosts: int | None = None
) -> None:
    """Run as the supervisor of this host."""
    launch = make_launch(args, host=host, hosts=hosts, least_hosts=least_hosts)
    if args.dry_run:
        _print_what_starts(launch)
        return
    raise SystemExit(supervise(launch))


def _start_at(args: Supervised, place: Place) -> None:
    """Run as the supervisor of the host that a scheduler assigns."""
    if place.name is not None and args.address == Supervised.address:
        args = dataclasses.replace(args, address=place.name)
    _start_here(args, place.host, place.hosts)


def _start_slurm(args: Slurm) -> None:
    place = slurm_place()
    if args.script_out is not None:
        _write_batch_script(args, args.script_out)
    elif place is not None:
        _start_at(args, place)
    elif has_slurm_job():
        srun = require_program("srun", "start this where Slurm is installed")
        hand_over([srun, "--ntasks-per-node=1", *this_command()], dry_run=args.dry_run)
    else:
        raise ValueError(
            "this is not in a Slurm allocation: write a batch script (--sbatch FILE) "
            "and submit it, or start this within salloc or srun"
        )


def _write_batch_script(args: Slurm, file: Path) -> None:
    """Write the script, and make the folder of its logs: Slurm does not."""
    batch = args.batch
    _require_secure_hosts("--batch.nodes", batch.nodes, args)
    here = dataclasses.replace(args, tls=None)
    logs = make_launch(here, host=0, hosts=batch.nodes).folder / "launch"
    workers = args.processes or batch.gpus or 1
    text = write_script(batch, this_command(without=OF_SCRIPTS), logs, workers)
    if args.dry_run:
        print(text, end="")
        return
    logs.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"written: submit it with `sbatch {shlex.quote(str(file))}`")


def _start_mpi(args: Mpi) -> None:
    place = mpi_place()
    if place is not None:
        _start_at(args, place)
        return
    remedy = f"install an MPI ({pip_install('mpi')}), or use `jaxpar launch local`"
    mpiexec = require_program("mpiexec", remedy)
    more = shlex.split(args.mpiexec)
    hand_over(
        [mpiexec, "-n", str(args.hosts), *more, *this_command()], dry_run=args.dry_run
    )


def _start_ray(args: Ray) -> None:
    if args.gpus:
        raise ValueError("--gpus: Ray chooses the GPUs; give --use-gpu instead")
    cluster, use_gpu = args.cluster, args.use_gpu
    processes = workers_per_host(args.processes, cluster=cluster, use_gpu=use_gpu)
    args = dataclasses.replace(args, processes=processes)
    place = ray_place()
    if place is not None:
        end_with_parent()
        _start_at(args, place)
        return
    _require_secure_hosts("--hosts", args.hosts, args)
    launch = make_launch(dataclasses.replace(args, tls=None), host=0, hosts=args.hosts)
    command = this_command()[1:]
    if args.dry_run:
        where = f"the cluster {cluster}" if cluster else "this host alone"
        device = "GPU" if use_gpu else "CPU"
        print(f"Ray, on {where}; hosts: {args.hosts}, workers per host: {processes},")
        print(f"with a {device} each; each host runs:")
        print(shlex.join(["python", *command]))
        return
    hosts = Hosts(args.hosts, cluster, use_gpu, args.insecure)
    raise SystemExit(start_on_ray(command, launch, hosts))


def _gpus(args: Supervised) -> tuple[int, ...]:
    """The GPUs of a host's workers."""
    if isinstance(args, Ray):
        # A supervisor sees those that Ray has reserved for it, numbered from 0.
        return tuple(range(args.processes or 1)) if args.use_gpu else ()
    return args.gpus or host_gpus()


def _require_secure_hosts(flag: str, hosts: int, args: Supervised) -> None:
    if hosts > 1 and args.tls is None and not args.insecure:
        raise ValueError(
            f"{flag} {hosts}: workers on several hosts listen where others can "
            "connect. Give the folder of the hosts' certificates (--tls DIR, by "
            "`jaxpar launch certs`), or --insecure on a private network"
        )


def make_launch(
    args: Supervised, *, host: int, hosts: int, least_hosts: int | None = None
) -> Launch:
    """Check the arguments; nothing is started.

    Raises:
      ValueError: if an argument is not possible; the message names the flag.
      FileNotFoundError: if the script or a certificate does not exist.
    """
    if not args.script.is_file():
        raise FileNotFoundError(f"{str(args.script)!r}: there is no such script")
    if not 0 <= host < hosts:
        raise ValueError(f"--host {host}: must be from 0 to --hosts - 1 ({hosts - 1})")
    if args.restarts < 0:
        raise ValueError(f"--restarts {args.restarts}: must be at least 0")
    tls = None if args.tls is None else read_tls(args.tls, args.address)
    require_secure(args.address, tls, insecure=args.insecure)
    gpus = _gpus(args)
    processes = args.processes or max(len(gpus), 1)
    if gpus and len(gpus) % processes:
        raise ValueError(
            f"--processes {processes}: {len(gpus)} GPUs can't be divided evenly; "
            "choose a divisor, or name the GPUs (--gpus)"
        )
    out = args.out or Path("runs", args.script.stem)
    return Launch(
        command=(str(args.script), "--out", str(out), *args.flags),
        folder=out,
        processes=processes,
        host=host,
        hosts=hosts,
        least_hosts=least_hosts,
        address=args.address,
        port=args.port,
        local_devices=args.local_devices,
        gpus=gpus,
        tls=tls,
        own_tls=tls is None and not args.insecure and is_loopback(args.address),
        limits=args.limits,
        restarts=args.restarts,
        heartbeat_seconds=args.heartbeat,
    )


def _print_what_starts(launch: Launch) -> None:
    """Print each worker's environment and command, in shell syntax."""
    total = launch.processes * launch.hosts
    port = launch.port or "PORT"
    attempt = Attempt(
        number=1,
        state="run",
        coordinator=None if total == 1 else f"{launch.address}:{port}",
        members=dict.fromkeys(range(launch.hosts), ""),
        processes=dict.fromkeys(range(launch.hosts), launch.processes),
        planned=total,
    )
    for worker in workers_of(launch, attempt):
        contract = variables(worker)[VARIABLE]
        command = shlex.join(worker_command(launch.command))
        print(f"{VARIABLE}={shlex.quote(contract)} {command}")
