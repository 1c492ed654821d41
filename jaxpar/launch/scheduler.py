"""Which host is this, of how many, according to the scheduler that started it?

Under Slurm and MPI every task is a supervisor, which starts its host's workers.
"""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Place:
    """A supervisor's place among those that a scheduler started.

    Attributes:
      host: its number, from 0.
      hosts: how many there are.
      name: the machine's name in the network; None if all are on one machine.
    """

    host: int
    hosts: int
    name: str | None


def slurm_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of a task that ``srun`` started; None outside of one."""
    if "SLURM_STEP_ID" not in environment:
        return None
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    return Place(
        host=int(environment["SLURM_PROCID"]),
        hosts=int(environment["SLURM_STEP_NUM_TASKS"]),
        name=environment["SLURMD_NODENAME"] if nodes > 1 else None,
    )


_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
"""Of MPICH and its derivatives; of Open MPI: rank, ranks, ranks on this host."""


def mpi_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place of a process that ``mpiexec`` started; None outside of one."""
    for rank, size, local in _MPI_VARIABLES:
        if rank in environment and size in environment:
            hosts = int(environment[size])
            is_alone = int(environment.get(local, "1")) == hosts
            name = None if is_alone else os.uname().nodename
            return Place(host=int(environment[rank]), hosts=hosts, name=name)
    return None


def has_slurm_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is within a Slurm allocation."""
    return "SLURM_JOB_ID" in environment


def require_program(name: str, remedy: str) -> str:
    """Find a scheduler's program: on the path, or next to this Python.

    Raises:
      FileNotFoundError: if there is none.
    """
    own = os.path.dirname(sys.executable)
    path = shutil.which(name) or shutil.which(name, path=own)
    if path is None:
        raise FileNotFoundError(f"there is no {name!r} on this machine: {remedy}")
    return path
