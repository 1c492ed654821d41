"""What is refused, and how private is a cluster, before Ray starts anything?"""

import os
import stat
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxpar.launch import ray_cluster
from jaxpar.launch.ray_cluster import connected


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
        pytest.raises(ValueError, match="--cluster: RAY_AUTH_MODE is 'disabled'"),
        connected("auto", 1, insecure=False),
    ):
        pytest.fail("connected")
    assert "init" not in fake


def test_missing_ray_is_reported_with_what_installs_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxpar\[ray\]'"),
        connected(None, 1, insecure=False),
    ):
        pytest.fail("connected")
