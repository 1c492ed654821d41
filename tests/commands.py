"""The command `jaxpar` as a user runs it, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


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
