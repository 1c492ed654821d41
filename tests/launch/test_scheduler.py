"""Is the place understood that a scheduler gives a process?"""

import pytest

from jaxpar.launch.scheduler import (
    Place,
    has_slurm_job,
    mpi_place,
    require_program,
    slurm_place,
)

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURMD_NODENAME": "node2",
}


def test_slurm_task_knows_its_place() -> None:
    assert slurm_place(TASK) == Place(3, 4, "node2")
    assert slurm_place({**TASK, "SLURM_STEP_NUM_NODES": "1"}) == Place(3, 4, None)
    assert slurm_place({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None
    assert has_slurm_job({"SLURM_JOB_ID": "7"})
    assert not has_slurm_job({})


@pytest.mark.parametrize(
    ("variables", "hosts", "is_named"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, 2, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, 2, True),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            4,
            False,
        ),
    ],
)
def test_mpi_process_knows_its_place(variables, hosts, is_named) -> None:
    place = mpi_place(variables)
    assert (place.host, place.hosts) == (1, hosts)
    assert (place.name is not None) == is_named


def test_process_of_no_scheduler_has_no_place() -> None:
    assert mpi_place({}) is None
    assert slurm_place({}) is None


def test_missing_program_is_named_with_a_remedy() -> None:
    with pytest.raises(FileNotFoundError, match=r"no 'no-such-program'.*: install it"):
        require_program("no-such-program", "install it")
