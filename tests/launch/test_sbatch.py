"""Is a job's script what Slurm takes?"""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.launch.sbatch import Batch, write_script


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
