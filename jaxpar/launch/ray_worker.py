"""What does each of Ray Train's workers do? It starts a worker of the run and watches.

That is a process of its own, as under every launcher, by the same contract: it has a
main thread for signals, ends with a code, and takes nothing of Ray along where JAX
aborts. It ends with its parent. What Ray is to try again is raised; what it is not to
try again is returned, and told in the attempt's folder.
"""

import dataclasses
import math
import os
import signal
from pathlib import Path
from typing import Any

from jaxpar.exit_codes import REFUSED
from jaxpar.launch.group import Group
from jaxpar.launch.ray_plan import RayPlan, attempt_folder, attempts
from jaxpar.launch.rendezvous import Attempt, Board, Outcome, wait_until
from jaxpar.launch.security import read_tls, require_secure
from jaxpar.launch.supervisor import free_port
from jaxpar.launch.watchdog import Watchdog
from jaxpar.launch.worker_environment import Worker

_TELL_SECONDS = 5.0


class WorkerFailedError(RuntimeError):
    """A worker ended badly; Ray is to start all of them again."""


def run_worker(config: dict[str, Any]) -> None:
    """Be one of Ray Train's workers.

    Args:
      config: ``plan``, the `RayPlan`.

    Raises:
      WorkerFailedError: if starting all workers again may help.
    """
    import ray.train  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - an extra
    import ray.util  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - an extra
    from ray.train import (  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
        collective,
    )

    plan: RayPlan = config["plan"]
    context = ray.train.get_context()
    index, address = context.get_world_rank(), ray.util.get_node_ip_address()
    total = context.get_world_size()
    told: Any = _announce(plan, address, total) if index == 0 else None
    number, coordinator, planned = collective.broadcast_from_rank_zero(told)
    board = Board(attempt_folder(plan.folder, number), index, 1, address)
    board.me = dataclasses.replace(board.me, id=str(index))
    board.tell(attempt=number, running=True)
    attempt = _attempt(number, coordinator, planned, total)
    outcome = _attend(plan, board, attempt)
    board.tell(running=False)
    if outcome.kind == "stopped":
        # Who is at its end yet is not to hear of one that is over, and be ended.
        wait_until(lambda: _all_ended(board, attempt), plan.limits.save, board.tell)
    board.tell(outcome=outcome)
    is_bad = outcome.kind in ("failed", "stalled", "saved")
    if is_bad and not _is_refused(board, attempt):
        raise WorkerFailedError(outcome.why)


def _announce(plan: RayPlan, address: str, total: int) -> tuple[int, str | None, int]:
    """Number the attempt and tell what it is; the first worker does."""
    number = max(attempts(plan.folder), default=0) + 1
    planned = Board(plan.folder / "launch", 0, total, address).planned(total)
    host = f"[{address}]" if ":" in address else address
    coordinator = None if total == 1 else f"{host}:{free_port(address)}"
    attempt = _attempt(number, coordinator, planned, total)
    # In one move, so that who finds the folder finds what it is of.
    folder = attempt_folder(plan.folder, number)
    unfinished = plan.stop.with_name(folder.name)
    Board(unfinished, 0, 1, address).announce(attempt)
    unfinished.rename(folder)
    return number, coordinator, planned


def _attempt(number: int, coordinator: str | None, planned: int, total: int) -> Attempt:
    return Attempt(
        number=number,
        state="run",
        coordinator=coordinator,
        members={index: str(index) for index in range(total)},
        processes=dict.fromkeys(range(total), 1),
        planned=planned,
    )


def _attend(plan: RayPlan, board: Board, attempt: Attempt) -> Outcome:
    """Start this worker and watch it until it has ended."""
    try:
        worker = _contract(plan, board, attempt)
    except (ValueError, OSError) as error:
        return Outcome("refused", REFUSED, f"worker {board.me.host}: {error}", [])
    if plan.on_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.chdir(plan.working_folder)
    group = Group([worker], plan.command)
    # Whether the others live is for Ray to say; who has ended well tells nothing more.
    limits = dataclasses.replace(plan.limits, lost=math.inf)
    watch = Watchdog(group, board, attempt, limits, lambda: _asked(plan))
    kind, code, why = watch.to_the_end()
    return Outcome(kind, code, why, group.ends())


def _contract(plan: RayPlan, board: Board, attempt: Attempt) -> Worker:
    """Check what this host has.

    Raises:
      ValueError: if strangers could connect to JAX's coordinator.
      OSError: if the script or a certificate is not there.
    """
    address = board.me.address
    tls = None if plan.tls is None else read_tls(plan.tls, address)
    require_secure(address, tls, insecure=plan.insecure)
    if not Path(plan.command[0]).is_file():
        raise FileNotFoundError(
            f"{plan.command[0]!r} is not on {board.me.hostname}: every host of the "
            "cluster must see the script and --out, at the same place"
        )
    return Worker(
        coordinator=attempt.coordinator,
        processes=len(attempt.members),
        index=board.me.host,
        planned=attempt.planned,
        address=address,
        local_devices=None,
        gpus=None,  # Ray shows this process those that it may use.
        tls=tls,
        folder=str(plan.folder),
        attempt=attempt.number,
        files=str(board.folder),
        start_seconds=int(plan.limits.start),
    )


def _asked(plan: RayPlan) -> int | None:
    return signal.SIGTERM if plan.stop.exists() else None


def _all_ended(board: Board, attempt: Attempt) -> bool:
    members = [board.member(index) for index in attempt.members]
    return not any(member is None or member.running for member in members)


def _is_refused(board: Board, attempt: Attempt) -> bool:
    """Whether another worker, for want of which this one failed, is not to run again.

    It waits for the others to tell: Ray tries again what is raised.
    """

    def outcomes() -> list[Outcome | None]:
        members = [board.member(index) for index in attempt.members]
        return [member.outcome if member else None for member in members]

    def is_refused() -> bool:
        return any(each and each.kind == "refused" for each in outcomes())

    wait_until(lambda: is_refused() or all(outcomes()), _TELL_SECONDS, board.tell)
    return is_refused()
