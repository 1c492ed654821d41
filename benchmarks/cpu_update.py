"""How fast does the host compute AdamW, beside torch's fused one on the same cores?

Masters, moments and gradients in fp32 and a copy of the parameters in bf16, as one
leaf; torch's copy is a cast after its step. All take turns in one process. The bytes
are those that must move: 16 read and 14 written for an element. Run it with an
interpreter that has jaxpar and torch (`jaxpar[oracle]`).

    python benchmarks/cpu_update.py
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch  # pyright: ignore[reportMissingImports]
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.jaxprs.by_element import ByElement, LeafGroup, split_by_element
from jaxpar.jaxprs.evaluate import inlined
from jaxpar.offload.c_code import c_code
from jaxpar.offload.native import Pass, compiled, cores
from jaxpar.offload.xla_pass import xla_pass

BYTES = 30
"""That an element's step moves."""

RATE, DECAY = 1e-3, 1e-2


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed, and how often."""

    elements: int = 1 << 24
    """Of the leaf."""
    rounds: int = 21
    """Turns of each; the median counts."""
    write: bool = True
    """Write benchmarks/results/cpu_update.json."""


def adamw_part(elements: int) -> tuple[ByElement, list[np.ndarray]]:
    """The elementwise part of optax's AdamW on one leaf, and its scalars' values."""
    leaf = jax.ShapeDtypeStruct((elements,), jnp.float32)
    optimizer = optax.adamw(RATE, weight_decay=DECAY)
    shapes, form = jax.tree.flatten(jax.eval_shape(optimizer.init, leaf))

    def step(grads: jax.Array, params: jax.Array, *state: jax.Array) -> list[jax.Array]:
        given = jax.tree.unflatten(form, state)
        updates, new = optimizer.update(grads, given, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), new))

    count, *moments = range(2, 2 + len(shapes))
    split = split_by_element(
        inlined(step, leaf, leaf, *shapes),
        [LeafGroup("leaf", (1, *moments), (0, *(n - 1 for n in moments)), (0,))],
    )
    _, (scalars,) = split.rest({count: jnp.int32(0)})
    return split.parts[0], [np.asarray(value) for value in scalars]


def turn_of(run: Pass, elements: int, scalars: Sequence[np.ndarray]) -> Callable:
    """A step in place of arrays of its own."""
    given = [np.full(elements, x, np.float32) for x in (1.0, 0.0, 0.0, 0.1)]
    copy = np.empty(elements, jnp.bfloat16)
    arrays = [*given, *given[:3], copy]
    return lambda: run(arrays, scalars)


def turn_of_torch(elements: int) -> Callable:
    """A step of torch's fused AdamW, and its cast."""
    torch.set_num_threads(cores())
    leaf = torch.nn.Parameter(torch.ones(elements))
    leaf.grad = torch.full((elements,), 0.1)
    copy = torch.empty(elements, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([leaf], lr=RATE, weight_decay=DECAY, fused=True)

    def turn() -> None:
        optimizer.step()
        copy.copy_(leaf.data)

    return turn


def main(config: Config) -> None:
    """Time all in turns, and write the medians."""
    part, scalars = adamw_part(config.elements)
    passes = {
        "jaxpar, C": compiled(c_code(part, jnp.bfloat16)),
        "jaxpar, XLA in blocks": xla_pass(part, jnp.bfloat16),
    }
    turns = {n: turn_of(p, config.elements, scalars) for n, p in passes.items()}
    turns["torch, fused"] = turn_of_torch(config.elements)
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(config.rounds + 2):
        for name, turn in turns.items():
            began = time.perf_counter()
            turn()
            if number >= 2:  # The first rounds touch the memory.
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(found) for name, found in times.items()}
    table = Table("AdamW", "ms", "GB/s", "x torch's time")
    for name, seconds in medians.items():
        rate = BYTES * config.elements / seconds / 1e9
        ratio = seconds / medians["torch, fused"]
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{rate:.1f}", f"{ratio:.2f}")
    console = Console()
    console.print(table)
    if config.write:
        measured = {"elements": config.elements, "cores": cores(), "seconds": medians}
        measured["torch"] = torch.__version__
        console.print(f"written: {write_result('cpu_update', measured).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
