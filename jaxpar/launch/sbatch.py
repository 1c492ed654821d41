"""How is a Slurm batch script written: it requeues itself at its time limit."""

import dataclasses
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jaxpar.exit_codes import STOPPED

# Slurm warns up to a minute early, and kills a task that has no handler yet.
_UNTIL_IT_LISTENS = """bash -c 'trap "" USR1; exec "$@"' jaxpar"""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The resources that a job requests from Slurm.

    Attributes:
      name: of the job.
      nodes: how many; each gets one supervisor.
      time: limit, in Slurm's form, such as "04:00:00".
      warn_seconds: time before the limit at which the run is signalled to save and end.
      gpus: per node; 0 to request none.
      partition: the partition; None for the default one.
      account: the account to charge; None for the default one.
    """

    name: str
    nodes: int = 1
    time: str = "04:00:00"
    warn_seconds: int = 300
    gpus: int = 0
    partition: str | None = None
    account: str | None = None

    def __post_init__(self):
        if self.nodes < 1:
            raise ValueError(f"--batch.nodes {self.nodes}: must be at least 1")
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            raise ValueError(
                f"--batch.time {self.time!r}: must be Slurm's [days-]hours:minutes:"
                "seconds"
            )
        if self.warn_seconds < 0 or self.gpus < 0:
            raise ValueError("--batch.warn-seconds and --batch.gpus must be at least 0")
        for flag in ("name", "partition", "account"):
            value = getattr(self, flag)
            if value is not None and not re.fullmatch(r"[\w.@-]+", value):
                raise ValueError(
                    f"--batch.{flag} {value!r}: may have letters, digits, '.', '_', "
                    "'@' and '-'"
                )


def write_script(batch: Batch, command: Sequence[str], folder: Path) -> str:
    """Write the script for ``sbatch``.

    Args:
      batch: the resources.
      command: the command of each node's task.
      folder: of the logs; the script makes it.

    Returns:
      The script's text.
    """
    asks = {
        "job-name": batch.name,
        "nodes": batch.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": batch.gpus or None,
        "time": batch.time,
        "partition": batch.partition,
        "account": batch.account,
        "signal": f"USR1@{batch.warn_seconds}",
        "output": f"{folder}/slurm-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{k}={v}" for k, v in asks.items() if v is not None]
    log = shlex.quote(f"{folder}/slurm-%j-task-%t.log")
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "",
            f"mkdir -p {shlex.quote(str(folder))}",
            f"srun --ntasks-per-node=1 --output={log} --open-mode=append \\",
            f"  {_UNTIL_IT_LISTENS} {shlex.join(command)}",
            "code=$?",
            f"if [ $code -eq {STOPPED} ]; then",
            "  # Saved at the warning: requeue to resume.",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
            "",
        ]
    )
