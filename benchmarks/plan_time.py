"""How long does a plan take, and does that grow with the devices?

7B on 512 GPUs, the mark 60 s and 8 GB of this machine's memory; and on 8, 64 and 4,096,
the mark 30 % of each other. Each plan is made in a process of its own, alone. Needs the
compilers (`.ci/setup --compilers yes`); no GPU.

    python benchmarks/plan_time.py
"""

import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from jaxpar.planner.recipe import plan_in_subprocess

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "pretrain.py"
FLAGS = ("--precision", "bf16", "--remat", "full", "--zero", "3")
HOSTS = (64, 1, 8, 512)
"""The first is the one whose memory is told."""


def measure(hosts: int) -> dict[str, Any]:
    """Plan 7B on hosts of eight H200s, one row a GPU."""
    rows = str(8 * hosts)
    began = time.perf_counter()
    plan = plan_in_subprocess(
        RECIPE, f"h200:{hosts}x8", ("--model", "7b", "--batch-size", rows, *FLAGS)
    )
    return {
        "devices": 8 * hosts,
        "seconds": time.perf_counter() - began,
        "compile_seconds": plan.compile_seconds,
        "peak_gb": plan.memory.peak / 1e9,
        # Of the largest process so far.
        "host_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
    }


def main() -> None:
    """Measure, print, write."""
    console = Console()
    found = [measure(hosts) for hosts in HOSTS]
    host_gb = found[0]["host_gb"]
    table = Table(box=box.SIMPLE)
    for name in ("devices", "seconds", "of which compiling"):
        table.add_column(name, justify="right")
    for row in sorted(found, key=lambda row: row["devices"]):
        table.add_row(
            f"{row['devices']:,}",
            f"{row['seconds']:.1f}",
            f"{row['compile_seconds']:.1f}",
        )
    console.print(table)
    times = [row["compile_seconds"] for row in found]
    spread = max(times) / min(times) - 1
    console.print(f"7B on 512: {found[0]['seconds']:.1f} s, {host_gb:.2f} GB of memory")
    console.print(f"compile time from 8 to 4,096 devices: within {spread:.0%}")
    measured = {"plans": found, "host_gb_of_7b": host_gb, "spread": spread}
    console.print(write_result("plan_time", measured))


if __name__ == "__main__":
    main()
