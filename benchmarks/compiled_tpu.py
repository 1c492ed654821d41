"""What do steps compiled for absent TPU slices send, over what the ZeRO table says?

GPT-3 1.3B, cut to four layers, on slices whose torus dims data is gathered and reduced
along one after the other. Needs libtpu (`.ci/setup --compilers yes`); no TPU.

    python benchmarks/compiled_tpu.py
    python benchmarks/compiled_tpu.py --only v5p:4x4x4
"""

import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.compiled.collectives import Collective
from jaxpar.mesh import DATA, MeshShape, make_mesh
from jaxpar.models import decoder_loss, make_decoder
from jaxpar.models.decoder.presets import decoder_config
from jaxpar.planner.absent_devices import prepare_process, tpu_devices
from jaxpar.sharding.torus import torus_dims

SLICES = ("v5e:8x8", "v5e:16x16", "v5p:4x4x4", "v5p:8x8x8", "v6e:16x16")
CASES = [(name, zero, 1) for name in SLICES for zero in (1, 2, 3)]
CASES += [("v5p:4x4x4", 3, 4), ("v5e:8x8", 3, 8)]
"""Slice, ZeRO stage, devices on the tensor axis: those of one torus dim."""

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
SAID = ("all-gather", "reduction")
"""Kinds of a budget on TPUs, where a reduction may be of either kind."""

Row = dict[str, float | str]


def sent(rows: tuple[Collective, ...], kind: str) -> int:
    """Bytes that a device sends over data by a kind of collective."""
    return sum(
        row.sent_bytes for row in rows if row.kind == kind and row.axes == (DATA,)
    )


def measure(topology: str, zero: int, tensor: int) -> Row:
    """Compile a step, and hold it to its budget."""
    began = time.perf_counter()
    mesh = make_mesh(MeshShape(data=-1, tensor=tensor), tpu_devices(topology))
    config = dataclasses.replace(decoder_config("1.3b", remat="full"), num_layers=4)
    rows = jax.ShapeDtypeStruct((mesh.shape[DATA], 513), jnp.int32)
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-4),
        sample_batch={"tokens": rows},
        mesh=mesh,
        zero=zero,
        precision="bf16",
    )
    budget = engine.closed_form_budget().communicated[DATA]
    collectives = engine.explain().program.collectives
    found: Row = {kind: sent(collectives, kind) / 1e6 for kind in KINDS}
    together = sum(sent(collectives, kind) for kind in KINDS)
    share = 1 - 1 / mesh.shape[DATA]
    said = share * sum(budget[kind] for kind in SAID)
    try:
        engine.verify()
        verdict = "sound"
    except jaxpar.BudgetExceeded as error:
        verdict = str(error.violations[0]).splitlines()[0]
    return {
        "torus": " x ".join(map(str, torus_dims(mesh, DATA))),
        **found,
        "of the closed form": together / said,
        "verify": verdict,
        "seconds": time.perf_counter() - began,
    }


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile: everything, and the results are written, if none is named."""

    only: str | None = None
    """A slice, such as v5p:4x4x4."""


def main(config: Config) -> None:
    """Compile, print and write."""
    prepare_process()
    console, found = Console(width=150), {}
    for topology, zero, tensor in CASES:
        if config.only in (None, topology):
            name = f"{topology} zero {zero}" + f" tensor {tensor}" * (tensor > 1)
            found[name] = measure(topology, zero, tensor)
            console.print(name, found[name], highlight=False)
    table = Table(title="MB sent over data a step, and in all over the closed form")
    columns = list(next(iter(found.values())))
    for column in ("", *columns):
        table.add_column(column, overflow="fold")
    for name, row in found.items():
        cells = (x if isinstance(x := row[c], str) else f"{x:,.2f}" for c in columns)
        table.add_row(name, *cells)
    console.print(table)
    if config.only is None:
        console.print(f"written: {write_result('compiled_tpu', found).name}")


if __name__ == "__main__":
    main(parse(Config, __doc__))
