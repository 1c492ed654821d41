"""Where does a measured number come from: device, versions and commit beside it."""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import optax

RESULTS = Path(__file__).resolve().parent / "results"
BESIDE = (
    "torch",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)
"""What else a number may depend on, where it is installed."""


def write_result(name: str, measured: Mapping[str, Any]) -> Path:
    """Write ``results/<name>.json``: what was measured, on what, with what.

    Args:
      name: of the benchmark.
      measured: JSON values; units in the names.

    Returns:
      The file.
    """
    device = jax.devices()[0]
    record = {
        "benchmark": name,
        "measured": dict(measured),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu_cores": os.cpu_count(),
            "machine": platform.machine(),
        },
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
            **_versions_of(BESIDE),
        },
        "commit": _commit(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def _versions_of(distributions: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str:
    """The commit measured; "+changes" where the tree differs from it."""

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=RESULTS.parent, capture_output=True, text=True
        )
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    changed = git("status", "--porcelain", "--", "../jaxpar", "../kernels_pallas", ".")
    own = [line for line in changed.splitlines() if "benchmarks/results/" not in line]
    return git("rev-parse", "HEAD") + ("+changes" if own else "")
