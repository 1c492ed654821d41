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

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))
# XLA warns of every length that does not fit.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contestants.runner import HERE
from benchmarks.kernels import attention, longest, optimizers
from benchmarks.kernels.timing import copy_bandwidth
from benchmarks.record import write_result
from benchmarks.train_gpu import gpu_name
from jaxpar.cli.recipe_flags import parse
from jaxpar.planner.absent_devices import prepare_process

Rows = Iterator[tuple[str, dict[str, float]]]
PARTS = (*attention.PARTS, *optimizers.MODELS, "longest")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure, and for how long."""

    part: str = ""
    """dense, window, patterns, random, 124m, 1.3b or longest; empty: all, each in a
    process of its own."""
    size: int = 128
    """Of an attention head: 64 or 128."""
    rounds: int = 20
    """Timed rounds of each; the median counts."""
    torch_python: str = ""
    """An interpreter that has torch; empty: this one."""
    torch_minutes: float = 3.5
    """Torch is stopped after as many; what it had measured by then counts."""
    write: bool = True
    """Write benchmarks/results/kernels_gpu_PART.json; without a GPU, only of the part
    that needs none, longest."""


def of_torch(config: Config) -> dict[str, dict[str, float]]:
    """What torch measures of a part, in a process of its own; empty where it fails."""
    python = config.torch_python or sys.executable
    with tempfile.TemporaryDirectory() as folder:
        if config.part in optimizers.MODELS:
            shapes = json.dumps(optimizers.shapes_of(config.part))
            args = ["adamw", str(config.rounds), shapes]
        else:
            path = Path(folder, "cases.npz")
            np.savez(path, allow_pickle=False, **layouts_of(config))
            args = ["attention", str(path), str(config.rounds)]
        command = [python, str(HERE / "torch_kernels.py"), *args]
        with (
            Path(folder, "out").open("w+") as out,
            Path(folder, "err").open("w+") as err,
        ):
            try:
                limit = config.torch_minutes * 60
                subprocess.run(
                    command, stdout=out, stderr=err, timeout=limit, check=True
                )
            except (subprocess.SubprocessError, OSError) as error:
                err.seek(0)
                print(f"torch: {error} {err.read().splitlines()[-1:]}", flush=True)
            out.seek(0)
            lines = [line for line in out if line.startswith("@@")]
    answers = [json.loads(line[2:]) for line in lines]
    for version in {answer["torch"] for answer in answers}:
        print(f"torch {version}", flush=True)
    return {answer["name"]: answer["found"] for answer in answers}


def layouts_of(config: Config) -> dict[str, Any]:
    """The layouts and shapes of an attention part's cases, as torch reads them."""
    arrays = {}
    for case in attention.cases_of(config.part):
        arrays[case.name] = np.asarray(case.layout.blocks)
        arrays[f"{case.name}/shape"] = np.array(case.shape(config.size))
    return arrays


def measured(config: Config) -> Rows:
    """A part's cases, on the GPU."""
    torch = of_torch(config)  # First: JAX keeps what it has taken of the memory.
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


def compiled(config: Config) -> Rows:
    """A part's cases, compiled for an H200."""
    if config.part in optimizers.MODELS:
        yield from optimizers.compiled(config.part)
        return
    for case in attention.cases_of(config.part):
        yield case.name, attention.compiled(case, config.size)


def run_part(config: Config, rows: Callable[[Config], Rows], *, writes: bool) -> None:
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


def main(config: Config) -> None:
    """Measure or compile."""
    if not config.part:
        commands = {part: [sys.executable, *sys.argv, "--part", part] for part in PARTS}
        codes = {part: subprocess.call(command) for part, command in commands.items()}
        failed = [part for part, code in codes.items() if code]
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
    if config.part not in PARTS:
        raise SystemExit(f"--part {config.part}: must be one of {', '.join(PARTS)}.")
    warnings.simplefilter("ignore", UserWarning)  # Of coarse tiles; they are printed.
    if config.part == "longest":
        prepare_process()
        run_part(config, lambda _: longest.compiled(), writes=True)
    elif gpu_name() is None:
        prepare_process()
        print("no GPU here: compiled for an H200, nothing is timed", flush=True)
        run_part(config, compiled, writes=False)
    else:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        run_part(config, measured, writes=True)


if __name__ == "__main__":
    main(parse(Config, __doc__))
