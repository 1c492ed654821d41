"""The command `jaxpar` as a user runs it, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PROGRESS = re.compile(
    r"(compiling \S+ for \S+|compiling what may fit|surveying \S+ on \S+"
    r"|looking for the smallest target that fits)"
    r"( \(\d+ s\)|: \d+ s)?"
)
"""A line that `jaxpar.progress.waiting` prints for `jaxpar plan`."""


def run_jaxpar(*args: Any, columns: int = 120) -> subprocess.CompletedProcess[str]:
    """Run it with arguments, on a terminal of so many columns."""
    return subprocess.run(
        [sys.executable, "-m", "jaxpar", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"},
        check=False,
    )


def complaints(stderr: str) -> list[str]:
    """The lines of standard error that do not say what a slow plan waits for."""
    return [line for line in stderr.splitlines() if not _PROGRESS.fullmatch(line)]
