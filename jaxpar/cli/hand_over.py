"""How does a command start itself again: in a job, on another host, under mpiexec?"""

import os
import re
import shlex
import sys
from collections.abc import Sequence

OF_SCRIPTS = re.compile(r"--(sbatch|batch[.][a-z_-]+)")
"""Flags of a job's script, each with one value; the job itself does not need them."""


def this_command(without: re.Pattern[str] | None = None) -> list[str]:
    """This command line, for others to run in earnest: without ``--dry-run``.

    Args:
      without: flags to leave out, each with its value; not after ``--``, where the
        script's own flags are.

    Example:
      >>> import sys
      >>> sys.argv[1:] = ["launch", "slurm", "--sbatch", "job.sh", "x.py"]
      >>> this_command(OF_SCRIPTS)[1:]
      ['-m', 'jaxpar', 'launch', 'slurm', 'x.py']
    """
    given = iter(sys.argv[1:])
    kept: list[str] = []
    for each in given:
        if each == "--":
            kept += [each, *given]
        elif without and without.fullmatch(each):
            next(given)
        elif without and without.fullmatch(each.partition("=")[0]):
            pass
        elif each != "--dry-run":
            kept.append(each)
    return [sys.executable, "-m", "jaxpar", *kept]


def hand_over(command: Sequence[str], *, dry_run: bool = False) -> None:
    """Replace this process by another program; its exit code is ours.

    Args:
      command: the program and its arguments.
      dry_run: print it, and start nothing.
    """
    if dry_run:
        print(shlex.join(command))
        return
    os.execv(command[0], list(command))
