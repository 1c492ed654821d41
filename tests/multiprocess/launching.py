"""Runs by `jaxpar launch`, as a user starts them, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest

from jaxpar.checkpoint.folder import is_complete, step_path
from jaxpar.launch.heartbeat import Beat, read_heartbeat
from tests.compiling import FAST

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/multiprocess/script.py"
LIMIT_SECONDS = 240


def missing(what: str) -> None:
    """Skip a test for what is not here; on the lane that must have it, fail."""
    if "JAXPAR_SCHEDULERS_REQUIRED" in os.environ:
        pytest.fail(f"{what}, and this lane must have it")
    pytest.skip(what)


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": FAST,
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def command(
    out: Path, *flags: str, of_launch: tuple[str, ...] = (), script: Path = SCRIPT
) -> list[str]:
    own = ["launch", "local", "--out", str(out), *of_launch, str(script)]
    return [sys.executable, "-m", "jaxpar", *own, "--", *flags]


class Launched:
    """A launcher that runs, and is ended with the block."""

    def __init__(self, out: Path, args: list[str], **options: Any):
        self.out, self.log = out, out.with_suffix(f".{time.monotonic_ns()}.log")
        out.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                args,
                cwd=ROOT,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        # Workers die with their supervisor.
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def code(self) -> int:
        return self.process.wait(timeout=LIMIT_SECONDS)

    def output(self) -> str:
        return self.log.read_text()

    def report(self) -> str:
        return (self.out / "launch" / "report.txt").read_text()

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """Wait for something to come true, while the launcher runs."""
        limit = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < limit:
            value = found()
            if value:
                return value
            if self.process.poll() is not None:
                pytest.fail(f"{what}: ended before\n{self.output()[-6000:]}")
            time.sleep(0.05)
        pytest.fail(f"{what}: not within {LIMIT_SECONDS} s\n{self.output()[-6000:]}")

    def attempt(self) -> int:
        path = self.out / "launch" / "attempt.json"
        return json.loads(path.read_text())["number"] if path.exists() else 0

    def beat(self, worker: int = 0) -> Beat | None:
        folder = self.out / "launch" / f"{self.attempt():04d}"
        return read_heartbeat(folder / f"worker-{worker:04d}.heartbeat")

    def is_at(self, step: int) -> bool:
        """Whether it is at a step, or further."""
        beat = self.beat()
        return beat is not None and beat.step is not None and beat.step >= step

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: self.is_at(step), f"step {step}")

    def wait_for_save(self, step: int) -> None:
        """Return when the checkpoint of a step is complete: it takes some steps."""
        path = step_path(self.out / "checkpoints", step)
        self.until(lambda: is_complete(path), f"the checkpoint of step {step}")

    def has_gained(self) -> bool:
        """Whether the attempt is a step further than where it went on from."""
        beat = self.beat()
        return beat is not None and (beat.step or 0) > (beat.resumed or 0) + 1

    def workers(self) -> list[psutil.Process]:
        """In the order of their indices."""
        found = [
            each
            for each in psutil.Process(self.process.pid).children()
            if "jaxpar.launch.worker" in each.cmdline()
        ]
        return sorted(found, key=lambda each: each.pid)

    def kill_a_worker(self, place: int) -> None:
        os.kill(self.workers()[place].pid, signal.SIGKILL)


def run_to_the_end(out: Path, *flags: str, processes: int, **of_launch: Any) -> str:
    """Launch a run and wait for it; what it said."""
    options = [f"--{k.replace('_', '-')}={v}" for k, v in of_launch.items()]
    args = command(out, *flags, of_launch=(f"--processes={processes}", *options))
    with Launched(out, args) as launched:
        code = launched.code()
        assert code == 0, (code, launched.output()[-6000:])
        return launched.output()


def final_files(out: Path, step: int) -> dict[str, bytes]:
    """The newest checkpoint's leaves, as bytes, by name."""
    from jaxpar.checkpoint import arrays, manifest  # noqa: PLC0415

    path = step_path(out / "checkpoints", step)
    saved = manifest.read_manifest(path)
    return {
        name: arrays.read_whole(path, name, saved).tobytes()
        for name, leaf in saved.leaves.items()
        if leaf.num_bytes
    }
