"""Is a scheduler's place understood, and is a job's script what Slurm takes?"""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.launch.sbatch import Batch, write_script
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


def test_script_asks_for_what_was_asked_and_requeues() -> None:
    batch = Batch(
        "big", nodes=4, time="2-12:00:00", gpus=8, account="us", partition="p"
    )
    command = ["python", "-m", "jaxpar", "launch", "a b.py", "--", "--note", "it's"]
    text = write_script(batch, command, Path("runs/big/launch"))
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert "#SBATCH --nodes=4" in asked
    assert "#SBATCH --ntasks-per-node=1" in asked
    assert "#SBATCH --gpus-per-node=8" in asked
    assert "#SBATCH --time=2-12:00:00" in asked
    assert "#SBATCH --signal=USR1@300" in asked
    assert "#SBATCH --requeue" in asked
    assert "#SBATCH --account=us" in asked
    assert "%t" in text, "a log for each task"
    assert _task(text)[-len(command) :] == command
    assert text.index("code=$?") < text.index("-eq 75") < text.index('requeue "$SLURM')


def _task(text: str) -> list[str]:
    """What `srun` is given as each node's task."""
    srun = text.split("srun ")[1].split("\ncode=")[0].replace("\\\n", "")
    words = shlex.split(srun)
    return words[[word.startswith("-") for word in words].index(False) :]


def test_warning_before_a_task_listens_does_not_kill_it() -> None:
    """Slurm sends it up to a minute early, while Python still starts."""
    signals = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('lives')"
    command = [sys.executable, "-c", signals]
    task = _task(write_script(Batch("early"), command, Path("runs/early/launch")))
    said = subprocess.run(task, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "lives\n")


@pytest.mark.parametrize(
    ("asks", "match"),
    [
        ({"nodes": 0}, "--batch.nodes 0: must be at least 1"),
        ({"time": "soon"}, "--batch.time 'soon': must be Slurm's"),
        ({"warn_seconds": -1}, "must be at least 0"),
        (
            {"partition": "a\n#SBATCH --wrap=x"},
            "--batch.partition .* may have letters",
        ),
    ],
)
def test_wrong_batches_are_refused(asks, match) -> None:
    with pytest.raises(ValueError, match=match):
        Batch("x", **asks)


def test_missing_program_is_named_with_a_remedy() -> None:
    with pytest.raises(FileNotFoundError, match=r"no 'no-such-program'.*: install it"):
        require_program("no-such-program", "install it")
