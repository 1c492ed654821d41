"""How fast are the kernels on a Hopper GPU, beside what others have?

Attention (parts dense, window, patterns, random): block-sparse attention beside cuDNN's
causal attention and window, XLA's with a mask, torch's SDPA and FlexAttention with the
same mask. Optimizers (124m, 1.3b): a step on a bucket beside optax's and torch's fused
AdamW; without a GPU, what whole training steps move. The bandwidth of a large copy is
measured in each part. Longest: how long a sequence of BERT's sizes can be trained on,
by what the compiled step holds.

Without a GPU everything is compiled for an H200, and nothing is timed.

    python benchmarks/kernels_gpu.py --part dense
"""

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))
# XLA warns of every length that does not fit.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.machine import find_gpu
from benchmarks.kernels import attention, longest, optimizers
from benchmarks.kernels.timing import copy_bandwidth
from benchmarks.kernels.torch_side import of_torch
from benchmarks.record import write_result
from jaxpar.planner.absent_devices import prepare_process

Rows = Iterator[tuple[str, dict[str, float]]]
PARTS = (*attention.PARTS, *optimizers.MODELS, "longest")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    each = "empty: all, each in a process of its own"
    add("--part", choices=PARTS, default="", help=each)
    add("--size", type=int, default=128, help="of an attention head: 64 or 128")
    add("--rounds", type=int, default=20, help="timed rounds; the median counts")
    add("--torch-python", default=sys.executable, help="an interpreter with torch")
    stops = "torch is stopped after as many; what it had measured by then counts"
    add("--torch-minutes", type=float, default=3.5, help=stops)
    writes = "write benchmarks/results/kernels_gpu_PART.json: what a GPU measured"
    add("--write", action=argparse.BooleanOptionalAction, default=True, help=writes)
    return parser.parse_args()


def measured(config: argparse.Namespace) -> Rows:
    """A part's cases, on the GPU."""
    # First: JAX keeps what it has taken of the memory.
    torch = of_torch(
        config.torch_python,
        config.part,
        size=config.size,
        rounds=config.rounds,
        minutes=config.torch_minutes,
    )
    bandwidth = copy_bandwidth(config.rounds)
    yield "copy", {"gb_per_second": bandwidth / 1e9}
    if config.part in optimizers.MODELS:
        for name, found in optimizers.measure(config.part, config.rounds, torch):
            found["of_copy_bandwidth"] = found["gb_per_second"] * 1e9 / bandwidth
            yield name, found
        return
    for case in attention.cases_of(config.part):
        theirs = torch.get(case.name, {})
        yield case.name, attention.measure(case, config.size, config.rounds, theirs)


def compiled(config: argparse.Namespace) -> Rows:
    """A part's cases, compiled for an H200."""
    if config.part in optimizers.MODELS:
        yield from optimizers.compiled(config.part)
        return
    for case in attention.cases_of(config.part):
        yield case.name, attention.compiled(case, config.size)


def run_part(
    config: argparse.Namespace,
    rows: Callable[[argparse.Namespace], Rows],
    *,
    writes: bool,
) -> None:
    """Measure or compile a part, print a table, and write it down."""
    console = Console(highlight=False, soft_wrap=True)
    found: dict[str, Any] = {}
    file = f"kernels_gpu_{config.part.replace('.', '_')}"
    if config.part in attention.PARTS:
        file += f"_{config.size}"
    for name, row in rows(config):
        found[name] = row
        if config.write and writes:
            write_result(file, found)  # What is measured stays, whatever comes after.
        console.print(f"{name}: done", style="dim")
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    table = Table(title=f"{config.part}", box=None)
    for column in ("", *columns):
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in found.items():
        cells = (f"{row[column]:.4g}" if column in row else "" for column in columns)
        table.add_row(name, *cells)
    console.print(table)
    if config.write and writes:
        console.print(f"written: {file}.json")


def main(config: argparse.Namespace) -> None:
    """Measure or compile."""
    if not config.part:
        commands = {part: [sys.executable, *sys.argv, "--part", part] for part in PARTS}
        codes = {part: subprocess.call(command) for part, command in commands.items()}
        failed = [part for part, code in codes.items() if code]
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
    warnings.simplefilter("ignore", UserWarning)  # Of coarse tiles; they are printed.
    if config.part == "longest":
        prepare_process()
        run_part(config, lambda _: longest.compiled(), writes=True)
    elif find_gpu() is None:
        prepare_process()
        print("no GPU here: compiled for an H200, nothing is timed", flush=True)
        run_part(config, compiled, writes=False)
    else:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        run_part(config, measured, writes=True)


if __name__ == "__main__":
    main(parse_arguments())
