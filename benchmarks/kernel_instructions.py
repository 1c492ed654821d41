"""How many machine instructions does a fused optimizer take for each parameter?

Where there are more than a GPU can issue while it moves a parameter's bytes, they bind
the kernel, and not memory. Compiled for an H200 that is not here, gradients and copies
in bf16; nothing is timed. Needs the compilers (`.ci/setup --compilers yes`), and CUDA's
assembler, ptxas, on the path; no GPU.

    python benchmarks/kernel_instructions.py
    python benchmarks/kernel_instructions.py --before OLDER.json
"""

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.machine_code import Kernel, dumped, read_kernels
from benchmarks.kernels.timing import compile_for_h200
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.planner.absent_devices import prepare_process
from kernels_pallas.fused_optimizers import (
    TILE,
    AdamW,
    Leaves,
    Lion,
    Numbers,
    Rule,
    fused_update,
    init_moments,
)

RULES = {"adamw": AdamW(), "lamb": AdamW(trust_ratio=True), "lion": Lion()}
THREADS = 128
"""Of a program, which takes a tile."""
TILES = 4096


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compare with."""

    before: str = ""
    """An earlier result of this script, whose counts are kept beside the new ones."""


def kernels_of(rule: Rule, bits: int) -> list[Kernel]:
    """The kernels of an optimizer's step."""
    elements = TILES * TILE
    leaves = Leaves(np.arange(TILES) // 7, -(-TILES // 7))

    def step(state: Any, grads: jax.Array, numbers: Numbers) -> Any:
        params, moments, copies = state
        options = {"copies": copies, "leaves": leaves, "decays": 0.1}
        new = fused_update(rule, params, grads, moments, numbers, **options)
        return new.params, new.moments, new.copies

    def flat(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((elements,), dtype)

    def number(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), dtype)

    moments = jax.eval_shape(lambda: init_moments(rule, elements, bits=bits))
    state = flat(jnp.float32), moments, flat(jnp.bfloat16)
    kinds = jnp.float32, jnp.int32, jnp.float32, jnp.bool_
    numbers = Numbers(*map(number, kinds))
    with dumped() as folder:
        compile_for_h200(step, (state, flat(jnp.bfloat16), numbers), donated=(0,))
        return read_kernels(folder)


def row_of(kernels: list[Kernel]) -> dict[str, float]:
    """Figures of a step."""
    assert all(kernel.is_straight for kernel in kernels), "a thread runs each once"
    instructions = sum(kernel.instructions for kernel in kernels)
    return {
        "kernels": len(kernels),
        "instructions_an_element": instructions / (TILE // THREADS),
        "registers": max(k.registers for k in kernels),
        "spilled_bytes": sum(k.spilled for k in kernels),
    }


def main(config: Config) -> None:
    """Compile, print, write results/kernel_instructions.json."""
    prepare_process()
    earlier: dict[str, Any] = {}
    if config.before:
        earlier = json.loads(Path(config.before).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for (name, rule), bits in itertools.product(RULES.items(), (32, 8)):
        case = f"{name}, {bits} bits"
        found[case] = row_of(kernels_of(rule, bits))
        if earlier:
            was = earlier["measured"][case]["instructions_an_element"]
            found[case]["before"] = was
    table = Table(box=None)
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    for column in ("", *columns):
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in found.items():
        table.add_row(name, *(f"{row[column]:g}" for column in columns))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if earlier:
        found["before_is_of_commit"] = earlier["commit"]
    console.print("written to", write_result("kernel_instructions", found).name)


if __name__ == "__main__":
    main(parse(Config, __doc__))
