"""What is refused, and how private is a cluster, before Ray starts anything?"""

import os
import signal
import stat
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxpar.launch import ray_cluster, ray_trainer
from jaxpar.launch.ray_cluster import connected
from jaxpar.launch.ray_plan import attempt_folder
from jaxpar.launch.ray_trainer import (
    Ray,
    launch_ray,
    num_workers,
    read_attempt,
)
from jaxpar.launch.rendezvous import Attempt, Board, Outcome, WorkerEnd
from jaxpar.launch.supervisor import only_one


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.touch()
    return path


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    own = {"RAY_AUTH_TOKEN": "another cluster's"}
    monkeypatch.setattr(os, "environ", own)
    return own


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Ray that notes what it is asked for, and listens where it is told."""
    told: dict[str, Any] = {"address": "127.0.0.1", "down": 0}

    def init(**given: Any) -> None:
        told["init"] = given

    def shutdown() -> None:
        told["down"] += 1

    module = types.SimpleNamespace(
        init=init,
        shutdown=shutdown,
        util=types.SimpleNamespace(get_node_ip_address=lambda: told["address"]),
    )
    monkeypatch.setattr(ray_cluster, "import_ray", lambda: module)
    return told


def test_cluster_of_ones_own_is_private(
    environment: dict[str, str], fake: dict[str, Any]
) -> None:
    with connected(None, 3, insecure=False):
        token = Path(environment["RAY_AUTH_TOKEN_PATH"])
        assert len(token.read_text()) == 64
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        given = fake["init"]
        # Ray opens this folder to everybody.
        assert Path(given["_temp_dir"]).parent == token.parent
    assert environment["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_TOKEN" not in environment
    assert (given["address"], given["num_cpus"]) == ("local", 3)
    assert given["include_dashboard"] is False
    assert fake["down"] == 1
    assert not token.parent.exists()


def test_cluster_that_others_reach_is_refused(
    environment: dict[str, str], fake: dict[str, Any]
) -> None:
    fake["address"] = "10.0.0.5"
    with (
        pytest.raises(RuntimeError, match=r"Ray listens on 10\.0\.0\.5, where others"),
        connected(None, 1, insecure=False),
    ):
        pytest.fail("connected")
    assert fake["down"] == 1


@pytest.mark.parametrize(
    ("mode", "insecure", "left"),
    [(None, False, "token"), ("token", False, "token"), (None, True, "disabled")],
)
def test_cluster_that_runs_is_used_with_its_token(
    mode: str | None,
    insecure: bool,
    left: str,
    environment: dict[str, str],
    fake: dict[str, Any],
) -> None:
    environment |= {} if mode is None else {"RAY_AUTH_MODE": mode}
    with connected("10.0.0.5:6379", 2, insecure=insecure):
        assert fake["init"]["address"] == "10.0.0.5:6379"
    assert environment["RAY_AUTH_MODE"] == left
    assert environment["RAY_AUTH_TOKEN"] == "another cluster's"


def test_cluster_without_a_token_is_refused(
    environment: dict[str, str], fake: dict[str, Any]
) -> None:
    environment["RAY_AUTH_MODE"] = "disabled"
    with (
        pytest.raises(ValueError, match="--address: RAY_AUTH_MODE is 'disabled'"),
        connected("auto", 1, insecure=False),
    ):
        pytest.fail("connected")
    assert "init" not in fake


def test_missing_ray_is_told_with_what_installs_it(
    script: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install jaxpar\[ray\]"):
        launch_ray(Ray(script, out=script.parent / "out"))


def test_what_cannot_be_started_is_refused_by_its_flag(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_trainer, "host_gpus", lambda: (0, 1))
    with pytest.raises(FileNotFoundError, match="'absent': there is no such script"):
        launch_ray(Ray(Path("absent")))
    for given, message in (
        ({"restarts": -1}, "--restarts -1: must be at least 0"),
        ({"processes": 0}, "--processes 0: must be at least 1"),
        ({"use_gpu": True, "processes": 3}, "--use-gpu: 3 workers need a GPU each, an"),
        ({"use_gpu": True, "address": "auto"}, "--processes: say how many of the clus"),
    ):
        with pytest.raises(ValueError, match=message):
            launch_ray(Ray(script, dry_run=True, **given))


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ({}, 1),
        ({"processes": 5}, 5),
        ({"use_gpu": True}, 2),
        ({"use_gpu": True, "address": "auto", "processes": 8}, 8),
    ],
)
def test_workers_are_as_many_as_asked_for_or_as_gpus(
    given: dict[str, Any],
    number: int,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_trainer, "host_gpus", lambda: (0, 1))
    assert num_workers(Ray(script, **given)) == number


def test_dry_run_prints_and_starts_nothing(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = script.parent / "out"
    args = Ray(script, out=out, processes=2, dry_run=True, flags=("--steps", "9"))
    assert launch_ray(args) == 0
    told = capsys.readouterr().out
    assert "2 workers of one CPU each, on a cluster on this host alone" in told
    assert f"{script} --out {out} --steps 9" in told
    assert not out.exists()


def test_second_launcher_of_a_run_is_refused(script: Path) -> None:
    out = script.parent / "out"
    with (
        only_one(Board(out / "launch", 0, 1, "")),
        pytest.raises(BlockingIOError, match="another launcher runs the run"),
    ):
        launch_ray(Ray(script, out=out))


def test_killed_workers_come_before_those_that_failed_for_want_of_them(
    tmp_path: Path,
) -> None:
    """One was killed, one aborted by JAX, and of one Ray's own process was killed."""
    folder = attempt_folder(tmp_path, 1)
    members = {index: str(index) for index in range(4)}
    processes = dict.fromkeys(members, 1)
    attempt = Attempt(1, "run", None, members, processes, planned=4)
    for index, code in ((0, -signal.SIGABRT), (1, 1), (2, -signal.SIGKILL)):
        end = WorkerEnd(index, code, "step", None, 3, None, [], [])
        board = Board(folder, index, 1, "127.0.0.1")
        board.announce(attempt)
        board.tell(outcome=Outcome("failed", 1, f"worker {index}", [end]))
    found, outcomes = read_attempt(tmp_path, 1)
    assert found == attempt
    assert list(outcomes) == [2, 3, 0, 1]
    assert outcomes[3].why == "worker 3: Ray's process ended before it could tell why"
