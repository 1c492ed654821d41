"""How does a run get its processes from Ray? As the workers of one `JaxTrainer`.

Ray places the workers and starts all of them again when one fails; the run then goes
on from its newest sound checkpoint. They join by jaxpar's own contract: Ray's joining
is left out, for without a GPU or a TPU it does nothing and says nothing, and its
coordinator listens on every address.
"""

import concurrent.futures
import contextlib
import dataclasses
import secrets
import shlex
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from jaxpar.exit_codes import GAVE_UP, STOPPED
from jaxpar.launch.limits import Limits
from jaxpar.launch.ray_cluster import connected
from jaxpar.launch.ray_plan import RayPlan, attempt_folder, attempts
from jaxpar.launch.rendezvous import (
    POLL_SECONDS,
    Attempt,
    Board,
    Outcome,
    cause_of,
)
from jaxpar.launch.report import Report
from jaxpar.launch.start import host_gpus
from jaxpar.launch.supervisor import only_one

_GOOD = ("done", "stopped")
_NOTICED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclasses.dataclass(frozen=True)
class Ray:
    """Start a run's workers by Ray Train, on a cluster or on this host alone.

    Start it again to go on with the run, with fewer or more workers if need be: the
    global batch stays the same.

    Attributes:
      script: what every worker runs; its own flags follow after ``--``. It is given
        ``--out`` too. Every host of the cluster must see it, at the same place.
      out: the run's folder; runs/ and the script's name if not given. All hosts must
        see it.
      processes: workers; if not given, one for each GPU of this host, else one.
      address: of a Ray cluster that runs, as ray.init takes it; if not given, one is
        started on this host for as long as the run takes, which only this host reaches.
      use_gpu: a GPU for each worker; if not, they use the CPU alone.
      tls: folder on every host with its certificates, by `jaxpar launch certs`. On a
        cluster of several hosts this or --insecure is needed.
      insecure: listen on addresses that others reach, without certificates; take a
        cluster that asks for no token.
      limits: how long a worker may be at one thing before all are started again.
      restarts: of the workers, at most.
      dry_run: print what would be started, and start nothing.
      flags: of the script.
    """

    script: Path
    out: Path | None = None
    processes: int | None = None
    address: str | None = None
    use_gpu: bool = False
    tls: Path | None = None
    insecure: bool = False
    limits: Limits = dataclasses.field(default_factory=Limits)
    restarts: int = 10
    dry_run: bool = False
    flags: tuple[str, ...] = ()


def launch_ray(args: Ray) -> int:
    """Run to the end, by Ray.

    Args:
      args: what to start.

    Returns:
      The exit code: 0 when all workers have ended well, `STOPPED` after a signal, the
      workers' own where starting again would not help, `GAVE_UP` otherwise.

    Raises:
      ValueError: if it can't be done; the message names the flag.
      FileNotFoundError: if the script is not there.
      ModuleNotFoundError: if Ray Train is not installed.
      RuntimeError: if Ray would listen where others reach it.
      BlockingIOError: if another launcher is at this run.
    """
    plan, processes = make_plan(args), num_workers(args)
    if args.dry_run:
        where = args.address or "a cluster on this host alone"
        device = "GPU" if args.use_gpu else "CPU"
        print(f"Ray Train: {processes} workers of one {device} each, on {where}")
        print(shlex.join(plan.command))
        return 0
    return _Launcher(plan, args, processes).run()


def make_plan(args: Ray) -> RayPlan:
    """Check what was asked for; nothing is started.

    Raises:
      ValueError: if restarts is negative.
      FileNotFoundError: if the script is not there.
    """
    if not args.script.is_file():
        raise FileNotFoundError(f"{str(args.script)!r}: there is no such script")
    if args.restarts < 0:
        raise ValueError(f"--restarts {args.restarts}: must be at least 0")
    out = (args.out or Path("runs", args.script.stem)).absolute()
    script = str(args.script.absolute())
    return RayPlan(
        command=(script, "--out", str(out), *args.flags),
        folder=out,
        working_folder=Path.cwd(),
        stop=_session(out) / "stop",
        on_cpu=not args.use_gpu,
        tls=None if args.tls is None else args.tls.absolute(),
        insecure=args.insecure,
        limits=args.limits,
    )


def num_workers(args: Ray) -> int:
    """How many workers to start.

    Raises:
      ValueError: if this host, or the number, can't give that many.
    """
    gpus = len(host_gpus())
    if args.use_gpu and args.address is not None and args.processes is None:
        raise ValueError("--processes: say how many of the cluster's GPUs to use")
    wanted = args.processes
    if wanted is None:
        wanted = max(gpus, 1) if args.use_gpu else 1
    if wanted < 1:
        raise ValueError(f"--processes {wanted}: must be at least 1")
    if args.use_gpu and args.address is None and wanted > gpus:
        raise ValueError(
            f"--use-gpu: {wanted} workers need a GPU each, and this host has {gpus}; "
            "choose fewer (--processes), or name a cluster (--address)"
        )
    return wanted


def _session(out: Path) -> Path:
    """A folder for what Ray and the launcher keep as long as the launch lasts."""
    return out / "launch" / f"ray-session-{secrets.token_hex(4)}"


class _Launcher:
    """One launch: a driver of Ray, with the run's report.

    Args:
      plan: what the workers do.
      args: what was asked for.
      processes: workers.
    """

    def __init__(self, plan: RayPlan, args: Ray, processes: int):
        self._plan, self._args, self._processes = plan, args, processes
        self._before = max(attempts(plan.folder), default=0)
        self._told = self._before
        self._cause = Outcome("ended", GAVE_UP, "nothing ran", [])
        self._asked: int | None = None
        self._is_connected = False
        self._report = Report(plan.folder, host=0)

    def run(self) -> int:
        """Have Ray start the workers, and again; tell what became of them."""
        self._notice_signals()
        board = Board(self._plan.folder / "launch", 0, self._processes, "")
        with only_one(board), contextlib.ExitStack() as at_end:
            address, insecure = self._args.address, self._args.insecure
            cluster = connected(address, self._processes, insecure=insecure)
            ray = at_end.enter_context(cluster)
            session = self._plan.stop.parent
            session.mkdir(mode=0o700)
            at_end.callback(shutil.rmtree, session, ignore_errors=True)
            self._is_connected = True
            self._notice_signals()  # Ray has put its own in their place.
            failed = self._fit(ray)
        code, why = self._verdict(failed)
        self._report.over(code, why)
        return code

    def _notice_signals(self) -> None:
        for number in _NOTICED:
            signal.signal(number, self._notice)

    def _notice(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self._asked == signal.SIGINT:
            raise SystemExit(128 + number)  # Asked twice: workers end with Ray's.
        self._asked = number
        if not self._is_connected:
            raise SystemExit(STOPPED)  # Ray may try for minutes.

    def _fit(self, ray: Any) -> str | None:
        """Attend to the run while Ray has it; what Ray gave up by."""
        trainer = self._trainer(ray)
        with contextlib.ExitStack() as at_end, contextlib.ExitStack() as following:
            # Outside the main thread, where Ray would take SIGINT for itself.
            threads = concurrent.futures.ThreadPoolExecutor(1)
            at_end.callback(threads.shutdown, wait=False)
            fit = threads.submit(trainer.fit)
            shown = self._before
            while not fit.done():
                if self._asked is not None:
                    self._plan.stop.touch()
                number = max(attempts(self._plan.folder), default=0)
                log = attempt_folder(self._plan.folder, number) / "worker-0000.log"
                if number > shown and log.exists():
                    following.close()
                    self._report_until(number - 1)
                    following.enter_context(self._report.following(log))
                    shown = number
                time.sleep(POLL_SECONDS)
            following.close()
            self._report_until(max(attempts(self._plan.folder), default=0))
            try:
                fit.result()
            except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
                return str(error)
        return None

    def _trainer(self, ray: Any) -> Any:
        from ray.train.v2 import jax  # noqa: PLC0415 # pyright: ignore - an extra

        from jaxpar.launch.ray_worker import run_worker  # noqa: PLC0415 - an extra

        restarts, session = self._args.restarts, self._plan.stop.parent
        train = ray.train
        return jax.JaxTrainer(
            run_worker,
            train_loop_config={"plan": self._plan},
            # Neither GPU nor TPU: jaxpar's workers join by themselves.
            jax_config=jax.JaxConfig(),
            scaling_config=train.ScalingConfig(
                num_workers=self._processes, use_gpu=self._args.use_gpu
            ),
            run_config=train.RunConfig(
                name=session.name,
                storage_path=str(session.parent),
                failure_config=train.FailureConfig(
                    max_failures=restarts, controller_failure_limit=restarts
                ),
            ),
        )

    def _report_until(self, number: int) -> None:
        """Report the attempts up to one."""
        for each in range(self._told + 1, number + 1):
            attempt, outcomes = read_attempt(self._plan.folder, each)
            if self._told > self._before:
                self._report.say(f"{self._cause.why}: Ray has started all again")
            self._report.attempt(attempt, outcomes)
            self._told, self._cause = each, cause_of(outcomes)

    def _verdict(self, failed: str | None) -> tuple[int, str]:
        """The run's code, and why."""
        if self._told == self._before:
            if self._asked is not None:
                return STOPPED, f"{signal.Signals(self._asked).name} came before it ran"
            return GAVE_UP, f"Ray started no workers: {failed}"
        cause = self._cause
        if cause.kind == "refused" or (failed is None and cause.kind in _GOOD):
            return cause.code, cause.why
        why = failed if cause.kind in _GOOD else cause.why
        return GAVE_UP, f"{why}; {self._args.restarts} restarts are used"


def read_attempt(folder: Path, number: int) -> tuple[Attempt, dict[int, Outcome]]:
    """Read what an attempt was, and what each worker told of its end.

    Args:
      folder: of the run.
      number: of the attempt.

    Returns:
      The attempt; the outcomes by worker, failed where none was told. Those that were
      killed come before those that then failed for want of them.
    """
    board = Board(attempt_folder(folder, number), 0, 1, "")
    attempt = board.attempt()
    assert attempt is not None, "announced with its folder"
    outcomes = {}
    for index in attempt.members:
        member = board.member(index)
        why = f"worker {index}: Ray's process ended before it could tell why"
        gone = Outcome("failed", 1, why, [])
        outcomes[index] = member.outcome if member and member.outcome else gone
    killed_first = sorted(outcomes.items(), key=lambda each: not _was_killed(each[1]))
    return attempt, dict(killed_first)


def _was_killed(outcome: Outcome) -> bool:
    codes = [end.code or 0 for end in outcome.workers] or [-signal.SIGKILL]
    return outcome.kind == "failed" and any(
        code < 0 and code != -signal.SIGABRT for code in codes
    )
