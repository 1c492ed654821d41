"""On what machine, and which code, is measured? Asked without starting JAX."""

import dataclasses
import hashlib
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("jaxpar", "kernels_pallas", "benchmarks", "tests/kernels_pallas")
RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
      name: as the driver names it, such as "NVIDIA H200".
      memory_gb: all of it.
    """

    name: str
    memory_gb: float


DRY = Device("none (dry run)", float("inf"))


def find_gpu() -> Device | None:
    """The first GPU, asked of its driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = "--query-gpu=name,memory.total"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return None
    name, _, mebibytes = lines[0].rpartition(",")
    return Device(name.strip(), float(mebibytes) * 2**20 / 1e9)


def digest(root: Path = ROOT, sources: tuple[str, ...] = SOURCES) -> str:
    """Twelve hex digits of the sources that a measurement depends on."""
    found = hashlib.sha256()
    for folder in sources:
        for path in sorted((root / folder).rglob("*")):
            is_source = path.suffix in (".py", ".toml") and path.is_file()
            if is_source and RESULTS not in path.parents:
                found.update(str(path.relative_to(root)).encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


def commit(root: Path = ROOT) -> str:
    """The commit, "+changes" where the tree differs; "unknown" without git."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *args], cwd=root, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changed = git("status", "--porcelain", "--", *SOURCES, ":!benchmarks/results")
    return head + ("+changes" if changed else "")
