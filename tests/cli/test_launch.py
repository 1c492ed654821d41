"""Does `jaxpar launch` refuse what can't be done, and print what it would start?"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxpar.cli.main import main
from jaxpar.launch.certificates import make_certificates
from jaxpar.launch.worker_environment import VARIABLE, current
from tests.launch.clock import set_clock

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('trained')")
    return str(path)


def refused(capsys: pytest.CaptureFixture, *args: str) -> str:
    with pytest.raises(SystemExit) as raised:
        main(["launch", *args])
    assert raised.value.code == 2
    # tyro wraps lines, and draws a box.
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_dry_run_prints_contracts_and_commands(script, capsys) -> None:
    own = ("--dry-run", "--processes=2", "--out=runs/x", script)
    main(["launch", "local", *own, "--", "--steps", "5"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for index, line in enumerate(lines):
        variable, *command = shlex.split(line)
        name, text = variable.split("=", 1)
        worker = current({name: text})
        assert name == VARIABLE
        assert (worker.index, worker.processes, worker.planned) == (index, 2, 2)
        assert command[1:4] == ["-m", "jaxpar.launch.worker", script]
        assert command[4:] == ["--out", "runs/x", "--steps", "5"]
    assert not Path("runs/x").exists()


def test_script_of_a_job_has_its_folder_made(script, tmp_path, capsys, monkeypatch):
    """Slurm fails a job without a word if the folder of its log is missing."""
    out, file = tmp_path / "a run", tmp_path / "job.sh"
    args = ("launch", "slurm", f"--out={out}", f"--sbatch={file}", "--batch.gpus=4")
    args += ("--batch.option", "qos=long", "--batch.option=exclusive", script)
    monkeypatch.setattr(sys, "argv", ["jaxpar", *args, "--dry-run", "--", "--steps=5"])
    main(sys.argv[1:])
    printed = capsys.readouterr().out
    assert not file.exists()
    assert not out.exists()
    monkeypatch.setattr(sys, "argv", ["jaxpar", *args, "--", "--steps=5"])
    main(sys.argv[1:])
    assert (out / "launch").is_dir()
    assert "submit it with `sbatch" in capsys.readouterr().out
    text = file.read_text()
    assert text == printed
    assert {"#SBATCH --qos=long", "#SBATCH --exclusive"} < set(text.splitlines())
    assert "#SBATCH --cpus-per-task=4" in text, "one for each GPU's worker"
    task = shlex.split(text.split("' jaxpar ")[1].split("\ncode=")[0])
    assert task[-6:-2] == ["launch", "slurm", f"--out={out}", script]
    assert task[-2:] == ["--", "--steps=5"]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("local", "none.py"), "'none.py': there is no such script"),
        (("local", "--host=2", "--hosts=2", "SCRIPT"), "--host 2: must be from 0 to"),
        (("local", "--address=node1", "SCRIPT"), "--address node1: others can reach"),
        (("local", "--tls=none", "SCRIPT"), "--tls 'none' has no ca.pem"),
        (("local", "--processes=3", "--gpus", "0", "1", "--", "SCRIPT"), ""),
        (("local", "--limits.step=-1", "SCRIPT"), "limits: step=-1 must be seconds"),
        (("slurm", "SCRIPT"), "this is not in a Slurm allocation"),
        (("slurm", "--batch.nodes=2", "--sbatch=x", "SCRIPT"), "--tls DIR"),
        (("slurm", "--batch.nodes=0", "--sbatch=x", "SCRIPT"), "--batch.nodes 0"),
    ],
)
def test_what_cant_be_done_is_said_before_anything_starts(
    args, match, script, capsys, monkeypatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if "--gpus" in args:
        args = ("local", "--processes=3", script, "--gpus", "0", "1")
        match = "--processes 3: 2 GPUs can't be divided evenly"
    told = refused(capsys, *(script if each == "SCRIPT" else each for each in args))
    assert match in told


def test_mpi_without_mpiexec_says_what_to_install(script, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    said = refused(capsys, "mpi", script)
    assert "install an MPI (pip install 'jaxpar[mpi]')" in said


def test_supervisor_has_no_jax() -> None:
    code = (
        "import sys; import jaxpar.cli.launch, jaxpar.launch.supervisor; "
        "sys.exit(any(m.split('.')[0] in ('jax', 'jaxlib') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run(*args: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxpar", "launch", "local", f"--out={out}", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.multiprocess
def test_script_that_refuses_is_told_once_and_not_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "refuses.py"
    script.write_text("raise ValueError('--rows 3: must be even')")
    ran = run("--processes=1", str(script), out=tmp_path / "run")
    assert ran.returncode == 78
    assert ran.stdout.count("launch: ValueError: --rows 3: must be even") == 1
    assert "restarting" not in ran.stdout
    attempt = json.loads((tmp_path / "run" / "launch" / "attempt.json").read_text())
    assert (attempt["number"], attempt["state"]) == (1, "over")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="jax has no TLS")
def test_certificates_that_have_ended_are_renewed_or_refused(
    tmp_path, monkeypatch
) -> None:
    """Two workers meet over TLS, with certificates that ended before the start."""
    script, certs = tmp_path / "train.py", tmp_path / "certs"
    script.write_text("import jax; print('met', jax.process_count())")
    set_clock(monkeypatch, -3)
    make_certificates(certs, ["127.0.0.1"], days=2)
    shutil.copytree(certs / "127.0.0.1", tmp_path / "copied")
    own = ("--processes=2", str(script))
    ran = run(f"--tls={tmp_path / 'copied'}", *own, out=tmp_path / "refused")
    assert ran.returncode == 78, ran.stdout
    assert "has ended on" in ran.stdout
    assert "jaxpar launch certs --renew" in ran.stdout
    assert "met" not in ran.stdout
    ran = run(f"--tls={certs}", *own, out=tmp_path / "run")
    assert ran.returncode == 0, ran.stdout
    assert "launch: certificates renewed: they are valid until " in ran.stdout
    assert "met 2" in ran.stdout


@pytest.mark.multiprocess
@pytest.mark.slow
def test_port_in_use_says_by_whom(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = run("--processes=2", f"--port={port}", str(script), out=tmp_path / "run")
    assert ran.returncode == 78
    told = ran.stdout
    assert f"worker 0 can't listen on 127.0.0.1:{port} (Address already in use)" in told
    assert f"process {os.getpid()} (" in told
    assert "choose another --port" in told


@pytest.mark.multiprocess
@pytest.mark.slow
def test_budget_ends_in_a_report(tmp_path: Path) -> None:
    """A script that dies by a signal, each time."""
    script = tmp_path / "dies.py"
    script.write_text("import os\nprint('dying')\nos.kill(os.getpid(), 11)")
    ran = run("--restarts=1", str(script), out=tmp_path / "run")
    assert ran.returncode == 69
    report = (tmp_path / "run" / "launch" / "report.txt").read_text()
    assert report.count("was killed by SIGSEGV") >= 2
    assert report.count("| dying") == 2
    assert "1 restarts of this hour are used" in report


@pytest.mark.multiprocess
def test_folder_that_cant_be_made_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = tmp_path / "train.py"
    script.write_text("")
    ran = run(str(script), out=tmp_path / "file" / "run")
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert "Not a directory" in ran.stderr
