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
    assert "#SBATCH --cpus-per-task=1" in asked
    assert f"#SBATCH --chdir={Path.cwd()}" in asked
    assert "%t" in text, "a log for each task"
    assert _task(text)[-len(command) :] == command
    assert text.index("code=$?") < text.index("-eq 75") < text.index('requeue "$SLURM')


def test_cores_are_asked_for_and_handed_on() -> None:
    """Slurm's srun has not taken them from the job since its version 22.05."""
    for batch, cores in ((Batch("x", cpus_per_task=16), 16), (Batch("x"), 4)):
        text = write_script(batch, ["true"], Path("logs"), processes=4)
        assert f"#SBATCH --cpus-per-task={cores}\n" in text
        assert f"srun --ntasks-per-node=1 --cpus-per-task={cores} " in text


def test_options_and_lines_of_shell_stand_as_they_were_given() -> None:
    batch = Batch(
        "x",
        option=("constraint=a100", "exclusive", "comment=it's #1"),
        preamble=("module purge", "module load cuda/12.9"),
    )
    lines = write_script(batch, ["true"], Path("logs")).splitlines()
    assert "#SBATCH --constraint=a100" in lines
    assert "#SBATCH --exclusive" in lines
    (comment,) = [line for line in lines if "comment" in line]
    assert shlex.split(comment.removeprefix("#SBATCH ")) == ["--comment=it's #1"]
    before = lines.index("set -e")
    assert lines[before : before + 4] == ["set -e", *batch.preamble, "set +e"]
    assert lines[before + 4].startswith("srun ")


def test_line_of_shell_that_fails_ends_the_job(tmp_path: Path) -> None:
    batch = Batch("x", preamble=("false",))
    script = tmp_path / "job.sh"
    script.write_text(write_script(batch, ["touch", str(tmp_path / "ran")], tmp_path))
    assert subprocess.run(["bash", str(script)], check=False).returncode == 1
    assert not (tmp_path / "ran").exists()


def test_folder_of_any_name_is_one_path_in_one_line() -> None:
    folder = Path("/scratch/a run's #1 100%")
    text = write_script(Batch("x"), ["true"], folder)
    (output,) = [line for line in text.splitlines() if line.startswith("#SBATCH --'ou")]
    own = "/scratch/a run's #1 100%%"
    assert shlex.split(output)[1:] == [f"--output={own}/slurm-%j.log"]
    srun = text.split("srun ")[1]
    assert f"--output={own}/slurm-%j-task-%t.log" in shlex.split(srun)
    for wrong in ("a\n#SBATCH --wrap=x", "a\\b"):
        with pytest.raises(ValueError, match=r"--out '.*no path with a backslash"):
            write_script(Batch("x"), ["true"], Path("/", wrong))


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
        ({"cpus_per_task": 0}, "--batch.cpus-per-task 0: must be at least 1"),
        ({"option": ("time=1:00",)}, "--batch.option 'time=1:00': give --batch.time"),
        ({"option": ("output=x",)}, "--batch.option 'output=x': the script sets it"),
        ({"option": ("--qos=long",)}, "long name, without dashes before it"),
        ({"option": ("qos=a\n#SBATCH --wrap=x",)}, "--batch.option .* in one line"),
    ],
)
def test_wrong_batches_are_refused(asks, match) -> None:
    with pytest.raises(ValueError, match=match):
        Batch("x", **asks)
