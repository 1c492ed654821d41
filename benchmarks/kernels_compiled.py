"""What do block-sparse attention's kernels compile to for an H200 that is not here?

For each head size: registers and shared memory, instructions in the loops around
matmuls, and by them the clocks that one multiprocessor spends on 64 x 64 scores, by
what limits it. Nothing is timed. Needs NVIDIA's nvdisasm (`pip install --target FOLDER
nvidia-cuda-nvdisasm`).

    python benchmarks/kernels_compiled.py --nvdisasm FOLDER/nvidia/cu13/bin/nvdisasm
"""

import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))
# XLA warns of every length that does not fit.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.attention import named, sparse, with_backward
from benchmarks.kernels.machine_code import dumped
from benchmarks.kernels.sass import Kernel, assemble, find_nvdisasm
from benchmarks.kernels.timing import compile_for_h200
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.planner.absent_devices import prepare_process

SEQ_LEN, WINDOW, HEADS = 8192, 2048, 16


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    sizes: tuple[int, ...] = (64, 128, 256)
    """Of an attention head."""
    kv_heads: int = 4
    """Key heads of 16 query heads."""
    nvdisasm: str = ""
    """NVIDIA's disassembler; empty: the one on the path."""
    write: bool = True
    """Write benchmarks/results/kernels_compiled.json."""


def kernels_of(
    config: Config, size: int, nvdisasm: str
) -> Iterator[tuple[str, Kernel]]:
    """Compile forward and both backward passes of a window of 2,048 tokens."""
    work = named("window", "sliding", SEQ_LEN, WINDOW).work
    q = jax.ShapeDtypeStruct((1, SEQ_LEN, HEADS, size), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, SEQ_LEN, config.kv_heads, size), jnp.bfloat16)
    with dumped() as folder:
        for deterministic in (True, False):
            call = with_backward(sparse(work, deterministic=deterministic))
            compile_for_h200(call, (q, k, k, q))
        for ptx in sorted(folder.glob("*.ptx"), key=_number):
            name = ptx.stem.removeprefix("block_sparse_attention_").rstrip("0123456789")
            yield name.rstrip("_"), assemble(ptx, nvdisasm)


def _number(ptx: Path) -> int:
    """Kernels are numbered as they are compiled."""
    return int(ptx.stem.rpartition("_")[2])


def rows_of(size: int, kernels: dict[str, Kernel]) -> dict[str, dict[str, Any]]:
    """What is printed and written of each kernel's loops."""
    rows = {}
    for name, kernel in kernels.items():
        for number, loop in enumerate(kernel.loops):
            rows[f"{size} {name} loop {number}"] = {
                "spilled_bytes": kernel.spilled,
                "smem_bytes": kernel.smem,
                "instructions": loop.instructions,
                "matmuls": loop.matmuls,
                "from_registers": loop.from_registers,
                "global_loads": loop.global_loads,
                "blocks": loop.blocks,
                **{f"{what}_clocks": clocks for what, clocks in loop.bounds().items()},
            }
    return rows


def main(config: Config) -> None:
    """Compile, print and write."""
    nvdisasm = find_nvdisasm(config.nvdisasm)
    if nvdisasm is None:
        raise SystemExit(
            f"--nvdisasm {config.nvdisasm!r}: not an executable, and none on the path; "
            "pip install --target FOLDER nvidia-cuda-nvdisasm, and give FOLDER/nvidia/"
            "cu13/bin/nvdisasm."
        )
    warnings.simplefilter("ignore", UserWarning)  # Of coarse tiles.
    prepare_process()
    found: dict[str, dict[str, Any]] = {}
    for size in config.sizes:
        found |= rows_of(size, dict(kernels_of(config, size, nvdisasm)))
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    table = Table(title="a window of 2,048 tokens; clocks a 64 x 64 block", box=None)
    for column in ("", *columns):
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{row[column]:.6g}" for column in columns))
    Console(highlight=False, soft_wrap=True, width=200).print(table)
    if config.write:
        print(f"written: {write_result('kernels_compiled', found).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
