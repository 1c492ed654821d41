"""Does `jaxpar env` name what a bug report needs: versions, devices, targets?"""

import importlib.metadata
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxpar.planner import environment
from jaxpar.planner.environment import describe
from tests.commands import run_jaxpar

ROOT = Path(__file__).resolve().parents[2]


def test_environment_names_versions_devices_and_targets():
    found = describe()
    assert found["jax"].count(".") >= 2
    assert "cpu" in found["devices"]
    assert "h200" in found["plans for GPUs"]
    assert "v5e" in found["plans for TPUs"]
    done = run_jaxpar("env")
    assert done.returncode == 0
    assert done.stdout.split()[0] == "python"


def test_versions_are_those_that_are_installed() -> None:
    found = describe()
    assert found["python"] == platform.python_version()
    for name in ("jax", "numpy", "optax", "orbax-checkpoint"):
        assert found[name] == importlib.metadata.version(name)
    assert found["cpu cores"] == str(os.cpu_count())
    assert found["devices"].startswith(f"{jax.device_count()} x ")


def test_package_that_is_not_installed_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_PACKAGES", ("jax", "no-such-package"))
    assert describe()["no-such-package"] == "not installed"


@pytest.mark.parametrize(
    ("stats", "memory"),
    [({"bytes_limit": 150_123_000_000}, "150.1 GB"), ({}, None), (None, None)],
)
def test_memory_of_a_device_is_named_if_it_is_known(stats, memory, monkeypatch) -> None:
    device = SimpleNamespace(device_kind="H200", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [device] * 2)
    found = describe()
    assert found["devices"] == "2 x H200"
    assert found.get("device memory") == memory


@pytest.mark.parametrize("is_there", [True, False])
def test_missing_compiler_is_told_with_what_to_install(is_there, monkeypatch) -> None:
    for name in ("has_gpu_compiler", "has_tpu_compiler"):
        monkeypatch.setattr(environment, name, lambda: is_there)
    found = describe()
    assert ("pip install 'jaxpar[plan-gpu]'" in found["plans for GPUs"]) != is_there
    assert ("pip install 'jaxpar[plan-tpu]'" in found["plans for TPUs"]) != is_there
    assert "h200" in found["plans for GPUs"]
    assert "v5e" not in found["plans for GPUs"]


def test_a_disk_is_measured_where_it_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(environment, "measure_disk", lambda folder: f"fast {folder}")
    assert describe(tmp_path)[f"disk of {tmp_path}"] == f"fast {tmp_path}"
    done = run_jaxpar("env", "--disk", tmp_path / "none")
    assert done.returncode != 0
    assert "is not a folder" in done.stdout + done.stderr
