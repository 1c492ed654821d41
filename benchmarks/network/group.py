"""Processes on the hosts of a network, which take steps together."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.contestants.runner import Contestant
from benchmarks.network.hosts import Network
from benchmarks.network.worker import Spec

_WORKER = Path(__file__).resolve().parent / "worker.py"


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a group's steps took, on average.

    Attributes:
      seconds: of a step, of the process that took longest.
      sent: bytes that a host sent in a step, of the one that sent most.
      loss: of the last step, the same on all.
    """

    seconds: float
    sent: float
    loss: float


class Group:
    """One process on every host; a context that ends them.

    Args:
      network: the hosts.
      **model: the fields of `Spec` that say what is trained.

    Raises:
      RuntimeError: if one ends; the message has its last words.
    """

    def __init__(self, network: Network, **model: int):
        self._members: list[Contestant] = []
        try:
            for host in range(len(network.addresses)):
                spec = dataclasses.asdict(Spec(network.addresses, host, **model))
                command = [sys.executable, str(_WORKER), json.dumps(spec)]
                self._members.append(Contestant([network.command(host, command)]))
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, technique: str, warm: int, timed: int) -> Turn:
        """Take steps, on all hosts at once.

        Args:
          technique: whose; its engine is made when it is first asked for.
          warm: steps before the ones that are timed.
          timed: steps, one or more.

        Raises:
          RuntimeError: if a process ends, their losses differ, or a step was skipped.
        """
        for member in self._members:
            member.ask(json.dumps([technique, warm, timed]))
        found = self._read()
        losses = {one["loss"] for one in found}
        if len(losses) > 1:
            raise RuntimeError(f"{technique}: the processes' losses differ: {losses}.")
        if skipped := max(one["skipped"] for one in found):
            raise RuntimeError(
                f"{technique}: {skipped:.0f} steps were skipped, for their gradients "
                "were not finite: what they send is not what is measured."
            )
        seconds, sent = (max(one[of] for one in found) for of in ("seconds", "sent"))
        return Turn(seconds / timed, sent / timed, losses.pop())

    def close(self) -> None:
        """End the processes."""
        for member in self._members:
            member.stop()

    def _read(self) -> list[dict[str, Any]]:
        return [member.read() for member in self._members]
