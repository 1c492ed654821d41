"""How is a Slurm batch script written: it requeues itself at its time limit."""

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jaxpar.launch.exit_codes import STOPPED

# Slurm warns up to a minute early, and kills a task that has no handler yet.
_UNTIL_IT_LISTENS = """bash -c 'trap "" USR1; exec "$@"' jaxpar"""

_OWN = {
    "account": "--batch.account",
    "chdir": None,
    "cpus-per-task": "--batch.cpus-per-task",
    "gpus-per-node": "--batch.gpus",
    "job-name": "--batch.name",
    "nodes": "--batch.nodes",
    "ntasks": None,
    "ntasks-per-node": None,
    "open-mode": None,
    "output": None,
    "partition": "--batch.partition",
    "requeue": None,
    "no-requeue": None,
    "signal": "--batch.warn-seconds",
    "time": "--batch.time",
    "wrap": None,
}
"""Options of sbatch that the script sets -> the flag for each; None if it is fixed."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The resources that a job requests from Slurm.

    Attributes:
      name: of the job.
      nodes: how many; each gets one supervisor.
      time: limit, in Slurm's form, such as "04:00:00".
      warn_seconds: time before the limit at which the run is signalled to save and end.
      gpus: per node; 0 to request none.
      cpus_per_task: CPU cores per node, for all of its workers; one for each worker if
        not given.
      partition: the partition; None for the default one.
      account: the account to charge; None for the default one.
      option: any other option of sbatch, as it stands there without the dashes, such as
        constraint=a100, qos=long or exclusive; may be given several times.
      preamble: a line of shell before the run starts, such as "module load cuda"; may
        be given several times. The job ends if one fails.
    """

    name: str
    nodes: int = 1
    time: str = "04:00:00"
    warn_seconds: int = 300
    gpus: int = 0
    cpus_per_task: int | None = None
    partition: str | None = None
    account: str | None = None
    option: tuple[str, ...] = ()
    preamble: tuple[str, ...] = ()

    def __post_init__(self):
        if self.nodes < 1:
            raise ValueError(f"--batch.nodes {self.nodes}: must be at least 1")
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise ValueError(
                f"--batch.cpus-per-task {self.cpus_per_task}: must be at least 1"
            )
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
        for each in self.option:
            _check_option(each)
        for each in self.preamble:
            if not each.isprintable():
                raise ValueError(
                    f"--batch.preamble {each!r}: must be one line of shell, without "
                    "control characters; give the flag several times for several lines"
                )


def _check_option(option: str) -> None:
    """Raise for an option that the script sets, or that sbatch can't have."""
    name = option.partition("=")[0]
    if name in _OWN:
        flag = _OWN[name]
        remedy = f"give {flag}" if flag else "the script sets it"
        raise ValueError(f"--batch.option {option!r}: {remedy}")
    if not re.fullmatch(r"[a-z][a-z-]*", name) or not _is_one_value(option):
        raise ValueError(
            f"--batch.option {option!r}: must be an option of sbatch by its long name, "
            "without dashes before it, in one line and without a backslash, such as "
            "constraint=a100"
        )


def _is_one_value(text: str) -> bool:
    """Whether quotes keep a text as it is: Slurm reads a backslash in them too."""
    return text.isprintable() and "\\" not in text


def _quoted(word: str) -> str:
    """A word for bash, in one line whatever its bytes are."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + "'"


def write_script(
    batch: Batch, command: Sequence[str], folder: Path, processes: int = 1
) -> str:
    """Write the script for ``sbatch``.

    Args:
      batch: the resources.
      command: the command of each node's task.
      folder: of the logs; it must exist when the job starts.
      processes: workers per node.

    Returns:
      The script's text. Its task runs in the folder that it is written in.

    Raises:
      ValueError: if a path has a line break, another control character or a backslash.
    """
    for flag, path in (("--out", folder.absolute()), ("the folder", Path.cwd())):
        if not _is_one_value(str(path)):
            raise ValueError(
                f"{flag} {str(path)!r}: Slurm takes no path with a backslash or with a "
                "line break; use another one"
            )
    cores = batch.cpus_per_task or processes
    logs = str(folder.absolute()).replace("%", "%%")
    asks = {
        "job-name": batch.name,
        "nodes": batch.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cores,
        "gpus-per-node": batch.gpus or None,
        "time": batch.time,
        "partition": batch.partition,
        "account": batch.account,
        "signal": f"USR1@{batch.warn_seconds}",
        "chdir": Path.cwd(),
        "output": f"{logs}/slurm-%j.log",
        "open-mode": "append",
    }
    options = [f"{name}={value}" for name, value in asks.items() if value is not None]
    # Slurm's own quoting, which is also the shell's.
    lines = [f"#SBATCH --{shlex.quote(each)}" for each in (*options, *batch.option)]
    log = shlex.quote(f"{logs}/slurm-%j-task-%t.log")
    preamble = ["set -e", *batch.preamble, "set +e"] if batch.preamble else []
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            "",
            *preamble,
            # srun does not take the cores of a task from the job.
            f"srun --ntasks-per-node=1 --cpus-per-task={cores} \\",
            f"  --output={log} --open-mode=append \\",
            f"  {_UNTIL_IT_LISTENS} {' '.join(map(_quoted, command))}",
            "code=$?",
            f"if [ $code -eq {STOPPED} ]; then",
            "  # Saved at the warning: requeue to resume.",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
            "",
        ]
    )
