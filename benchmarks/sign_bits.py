"""What do the passes of a 1-bit exchange cost an H200, in plain JAX and as kernels?

Of each: bytes of memory and machine instructions for each parameter, and the time that
each of the two takes, at 4.8 TB/s and at an instruction a clock and scheduler, 1.7 GHz:
the longer one is a bound. Compiled for an H200 that is not here; nothing is timed.
Needs the compilers (`.ci/setup --compilers yes`), and CUDA's assembler, ptxas, on the
path; no GPU.

    python benchmarks/sign_bits.py
"""

import dataclasses
import functools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.machine_code import Kernel, dumped, read_kernels
from benchmarks.kernels.timing import compile_for_h200
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.planner.absent_devices import prepare_process
from kernels_pallas.sign_bits import COLUMNS, pack, pack_mean, unpack

BYTES_A_SECOND, ISSUED_A_SECOND = 4.8e12, 132 * 4 * 32 * 1.7e9
THREADS, PROGRAM = 128, 4096
"""Of a kernel's program; and its elements."""
DUMPED = {"xla_dump_emitter_re": ".*", "xla_gpu_dump_llvmir": True}
AT_ONCE = 8
"""Workers whose bits the kernel adds up in an iteration of its loop."""

Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    parameters: int = 1 << 24
    """Of the leaf."""
    workers: tuple[int, ...] = (2, 8, 16, 32, 64, 128)
    """Data shards."""


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array's."""
    return jax.ShapeDtypeStruct(dims, dtype)


def mean_shapes(size: int, workers: int) -> Shapes:
    """Of `pack_mean`'s arrays, of a chunk."""
    bits = shape(workers, size // 8, dtype=jnp.uint8)
    return bits, shape(workers), shape(size), shape(size, dtype=jnp.uint8)


def received(
    bits: jax.Array, scales: jax.Array, mask: jax.Array, given: jax.Array, own: Any
) -> tuple[jax.Array, jax.Array]:
    """The exchange's last pass: what has come, and the error of what was sent."""
    of_columns = jnp.tile(scales, COLUMNS // len(scales))
    whole = unpack(bits.T.reshape(-1), of_columns, columns=COLUMNS)
    error = given - own * jnp.where(given >= 0, 1.0, -1.0)
    return jnp.where(mask != 0, whole, 0.0), jnp.where(mask != 0, error, 0.0)


def in_plain_jax(call: Callable[..., Any], args: Shapes) -> tuple[float, float]:
    """Bytes and instructions of XLA's kernels."""
    with tempfile.TemporaryDirectory() as name:
        folder, options = Path(name), DUMPED | {"xla_dump_to": name}
        moved = compile_for_h200(call, args, options=options)["moved_gb"] * 1e9
        threads, instructions = dict(_threads(folder)), 0
        kernels = read_kernels(folder)
        for kernel in kernels:
            text = (folder / f"{kernel.name}.ptx").read_text()
            (entry,) = re.findall(r"\.entry (\w+)", text)
            assert kernel.is_straight, f"{entry}: a thread runs each once"
            instructions += kernel.instructions * threads[entry]
    return moved, instructions


def _threads(folder: Path) -> Iterator[tuple[str, int]]:
    """Of each launch of a program."""
    (path,) = folder.glob("*thunk_sequence.txt")
    launch = r"\] (\w+)\s+grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+),"
    for name, x, y, z, threads in re.findall(launch, path.read_text()):
        yield name, int(x) * int(y) * int(z) * int(threads)


def kernel_of(call: Callable[..., Any], args: Shapes) -> tuple[float, Kernel]:
    """Bytes that a program with one kernel moves, and the kernel."""
    with dumped() as folder:
        moved = compile_for_h200(call, args)["moved_gb"] * 1e9
        (kernel,) = read_kernels(folder)
    return moved, kernel


def rows(config: Config) -> Iterator[tuple[str, float, float]]:
    """Names, bytes and instructions, of all parameters."""
    size = config.parameters
    whole = shape(size), shape(size), shape(size, dtype=jnp.uint8)

    plain = functools.partial(pack, implementation="reference")
    yield "pack, plain", *in_plain_jax(plain, whole)
    moved, kernel = kernel_of(pack, whole)
    yield "pack, kernel", moved, kernel.instructions * THREADS * size / PROGRAM
    for workers in config.workers:
        chunk = size // workers
        mean = functools.partial(pack_mean, columns=COLUMNS // workers)
        plain = functools.partial(mean, implementation="reference")
        args = mean_shapes(chunk, workers)
        yield f"mean of {workers}, plain", *in_plain_jax(plain, args)
        moved, kernel = kernel_of(mean, args)
        instructions = kernel.instructions
        if not kernel.is_straight:
            # Its code has the first eight workers, and a loop over each eight others.
            first = mean_shapes(chunk, AT_ONCE)
            instructions += (workers // AT_ONCE - 2) * (
                kernel.instructions - kernel_of(mean, first)[1].instructions
            )
        yield (
            f"mean of {workers}, kernel",
            moved,
            instructions * chunk / PROGRAM * THREADS,
        )
    bits = shape(8, size // 64, dtype=jnp.uint8), shape(8)
    args = (*bits, whole[2], whole[0], shape())
    yield "unpack, plain", *in_plain_jax(received, args)


def main(config: Config) -> None:
    """Compile, print, write results/sign_bits.json."""
    prepare_process()
    columns = ("bytes", "instructions", "ps of bytes", "ps of instructions")
    table = Table("", *columns, title="for each parameter", box=None)
    found = {}
    for name, moved, instructions in rows(config):
        times = 1e12 * moved / BYTES_A_SECOND, 1e12 * instructions / ISSUED_A_SECOND
        of_one = (x / config.parameters for x in (moved, instructions, *times))
        found[name] = dict(zip(columns, of_one, strict=True))
        table.add_row(name, *(f"{x:.2f}" for x in found[name].values()))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print("written to", write_result("sign_bits", found).name)


if __name__ == "__main__":
    main(parse(Config, __doc__))
