"""What is requested from Ray, and what is refused before Ray starts anything?"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpar.cli import launch as cli_launch
from jaxpar.cli.launch import Ray, _start_ray
from jaxpar.launch import ray_hosts
from jaxpar.launch.exit_codes import STOPPED
from jaxpar.launch.ray_hosts import VARIABLE, Hosts, ray_place, start_on_ray
from jaxpar.launch.scheduler import Place
from jaxpar.launch.start import Launch


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "script.py"
    path.touch()
    return path


def test_place_is_what_ray_s_task_has_written() -> None:
    assert ray_place({}) is None
    given = {"host": 1, "hosts": 2, "name": "10.0.0.5"}
    assert ray_place({VARIABLE: json.dumps(given)}) == Place(1, 2, "10.0.0.5")


def test_dry_run_prints_and_starts_nothing(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["launch", "ray", "--processes=2", "--dry-run", str(script)]
    monkeypatch.setattr(sys, "argv", ["jaxpar", *given])
    out = script.parent / "out"
    _start_ray(Ray(script, out=out, processes=2, dry_run=True))
    said = capsys.readouterr().out
    assert "on this host alone; hosts: 1, workers per host: 2,\nwith a CPU each" in said
    assert f"python -m jaxpar launch ray --processes=2 {script}" in said
    assert not out.exists()


def test_several_hosts_need_certificates_and_a_cluster(script: Path) -> None:
    with pytest.raises(ValueError, match=r"--hosts 2: workers on several hosts listen"):
        _start_ray(Ray(script, hosts=2, cluster="auto"))
    launch, hosts = Launch(("s",), script.parent), Hosts(2, None, False, True)
    with pytest.raises(ValueError, match=r"--hosts 2: without a cluster of Ray"):
        start_on_ray([], launch, hosts)


def test_missing_script_is_refused(script: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'absent': there is no such script"):
        _start_ray(Ray(Path("absent")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"restarts": -1}, "--restarts -1: must be at least 0"),
        ({"processes": 0}, "--processes 0: must be at least 1"),
        ({"gpus": (1,)}, "--gpus: Ray chooses the GPUs"),
        ({"use_gpu": True, "processes": 3}, "--use-gpu: 3 workers need a GPU each, an"),
        ({"use_gpu": True, "cluster": "auto"}, "--processes: state how many GPUs to"),
    ],
)
def test_impossible_request_is_refused_by_its_flag(
    given: dict[str, Any], message: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosts, "host_gpus", lambda: (0, 1))
    with pytest.raises(ValueError, match=message):
        _start_ray(Ray(script, dry_run=True, **given))


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ({}, 1),
        ({"processes": 5}, 5),
        ({"use_gpu": True}, 2),
        ({"use_gpu": True, "cluster": "auto", "processes": 8}, 8),
    ],
)
def test_workers_are_as_many_as_asked_for_or_as_gpus(
    given: dict[str, Any], number: int, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor sees the GPUs that Ray reserved, from 0; without any, none."""
    for module in (ray_hosts, cli_launch):
        monkeypatch.setattr(module, "host_gpus", lambda: (0, 1))
    launches = []
    monkeypatch.setattr(cli_launch, "supervise", lambda each: launches.append(each))
    monkeypatch.setattr(cli_launch, "end_with_parent", lambda: None)
    place = json.dumps(dataclasses.asdict(Place(0, 1, None)))
    monkeypatch.setenv(VARIABLE, place)
    with pytest.raises(SystemExit):
        _start_ray(Ray(script, **given))
    (launch,) = launches
    assert launch.processes == number
    assert launch.gpus == (tuple(range(number)) if "use_gpu" in given else ())


def run_on_host(folder: Path, program: str) -> int:
    """Run a supervisor's task, with a program for the supervisor."""
    session = folder / "launch" / "ray-1"
    session.mkdir(parents=True, exist_ok=True)
    return ray_hosts._run_supervisor(["-c", program], 0, 1, {}, folder, session)


def test_supervisor_that_was_killed_is_an_error_that_ray_retries(
    tmp_path: Path,
) -> None:
    killed = "import os; print('here'); os.kill(os.getpid(), 9)"
    with pytest.raises(ChildProcessError, match=r"host 0 .* was killed by SIGKILL"):
        run_on_host(tmp_path, killed)
    (tmp_path / "launch" / "ray-1" / "host-0000.log").write_text("step 1\n")
    assert run_on_host(tmp_path, "raise SystemExit(75)") == 75
    report = (tmp_path / "launch" / "report.txt").read_text()
    assert "Ray has started the supervisor of host 0 again" in report


def test_stop_before_a_supervisor_listens_is_a_stop(tmp_path: Path) -> None:
    session = tmp_path / "launch" / "ray-1"
    session.mkdir(parents=True)
    (session / "stop").touch()
    assert run_on_host(tmp_path, "import time; time.sleep(60)") == STOPPED


def test_host_without_the_folders_is_named(tmp_path: Path) -> None:
    given = ([], 1, 2, {}, tmp_path, tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="all hosts must mount --out and"):
        ray_hosts._run_supervisor(*given)


def test_supervisor_that_ray_placed_ends_with_its_parent(script: Path) -> None:
    """A task of Ray that is killed leaves no supervisor behind."""
    script.write_text("import time; time.sleep(60)")
    place = {"host": 0, "hosts": 1, "name": None}
    out = script.parent / "out"
    own = ["-m", "jaxpar", "launch", "ray", "--processes=1", f"--out={out}"]
    program = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, *{own!r}, {str(script)!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, VARIABLE: json.dumps(place)},
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        member = out / "launch" / "host-0000.json"
        _until(member.exists)
        parent.send_signal(signal.SIGKILL)
    _until(lambda: not _is_running(child))


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def _until(holds) -> None:
    import time  # noqa: PLC0415

    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)
