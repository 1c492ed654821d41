"""What does the assembler say of kernels that a process compiles for an H200?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Assembly = tuple[dict[str, Any], list[int], list[int]]
"""A configuration and what was found, bytes spilled, and registers of each kernel."""


def compiled_by(module: str) -> list[Assembly]:
    """Run a module that prints a line of JSON behind each configuration's kernels."""
    done = run(module, MOSAIC_GPU_DUMP_PTXAS="1")
    results, told = [], ""
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            spilled = [int(x) for x in re.findall(r"(\d+) bytes spill", told)]
            used = [int(x) for x in re.findall(r"Used (\d+) registers", told)]
            results.append((json.loads(line), spilled, used))
            told = ""
        else:
            told += line
    return results


def run(
    module: str, *args: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a module that compiles, with variables of the environment."""
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done
