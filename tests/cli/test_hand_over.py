"""Is a command line handed on whole, but for what is left out?"""

import sys

import pytest

from jaxpar.cli.hand_over import OF_SCRIPTS, hand_over, this_command


@pytest.mark.parametrize(
    "own",
    [
        ["--sbatch", "a b.sh", "--batch.nodes", "2"],
        ["--sbatch=job.sh", "--batch.cpus_per_task=4", "--batch.option", "qos=long"],
        [],
    ],
)
def test_flags_of_the_script_are_left_out_but_not_those_of_the_run(own, monkeypatch):
    others = ["launch", "slurm", "--out", "runs/x", "train.py"]
    flags = ["--", "--batch.size=4", "--sbatch", "--steps=5", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["jaxpar", *others, "--dry-run", *own, *flags])
    start = [sys.executable, "-m", "jaxpar"]
    assert this_command(OF_SCRIPTS) == [*start, *others, *flags]
    assert this_command() == [*start, *others, *own, *flags]


def test_dry_run_prints_what_would_take_over(capsys):
    hand_over(["srun", "a b"], dry_run=True)
    assert capsys.readouterr().out == "srun 'a b'\n"
