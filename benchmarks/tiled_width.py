"""How wide may an MLP be on eight GPUs, whole and in tiles, by compiled steps?

A residual MLP of width x 4 width, ZeRO 3, bf16, AdamW, with its optimizer state on the
devices or updated by the hosts; the widest whose peak is within a GPU's memory. Needs
the compilers (`.ci/setup --compilers yes`); no GPU.

    python benchmarks/tiled_width.py
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.mesh import MeshShape, compile_only, make_mesh
from jaxpar.models import TiledMLP
from jaxpar.models.mlp import MLP
from jaxpar.planner.absent_devices import prepare_process
from jaxpar.planner.plan_step import plan_step
from jaxpar.planner.targets import parse_target

ROWS, TOKENS, STEP = 8, 256, 1024
OFFLOAD = {"nothing": None, "update on the host": jaxpar.Offload(update="host")}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is searched."""

    target: str = "h200:1x8"
    """The devices."""
    tiles: int = 64
    """Of the tiled MLP."""
    most: int = 262_144
    """The largest width that is tried; a multiple of 1,024."""
    write: bool = True
    """Write benchmarks/results/tiled_width.json."""


class Block(nnx.Module):
    """``x + mlp(x)``."""

    def __init__(self, width: int, tiles: int, rngs: nnx.Rngs):
        how = {"activation": "gelu", "bias": True, "output_stddev": 0.02, "rngs": rngs}
        if tiles:
            self.mlp = TiledMLP(width, 4 * width, tiles=tiles, **how)
        else:
            self.mlp = MLP(width, 4 * width, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, width] -> [B, T, width]."""
        return x + self.mlp(x)


def loss_fn(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean square of what the block returns."""
    x = batch["x"].astype(jnp.bfloat16)
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def peak(config: Config, width: int, tiles: int, offload: Any) -> int:
    """Bytes at the peak of a device's step."""
    target = parse_target(config.target)
    devices = target.devices()
    mesh = make_mesh(MeshShape(data=len(devices)), devices)
    with compile_only():
        engine = jaxpar.initialize(
            model=lambda rngs: Block(width, tiles, rngs),
            loss_fn=loss_fn,
            optimizer=optax.adamw(1e-4),
            sample_batch={"x": jax.ShapeDtypeStruct((ROWS, TOKENS, width), np.float32)},
            mesh=mesh,
            zero=3,
            precision="bf16",
            offload=offload,
        )
    return plan_step(engine, target, None).memory.peak


def widest(config: Config, tiles: int, offload: Any, room: int) -> int:
    """The widest that fits, in steps of 1,024; by halving."""
    fits, fails = 0, config.most // STEP + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if peak(config, middle * STEP, tiles, offload) <= room:
            fits = middle
        else:
            fails = middle
    return fits * STEP


def main(config: Config) -> None:
    """Search, print, write."""
    prepare_process()
    console, hardware = Console(), parse_target(config.target).hardware
    assert hardware is not None, "a GPU or a TPU"
    table = Table("offloaded", "whole", f"{config.tiles} tiles", box=box.SIMPLE)
    found: dict[str, dict[str, int]] = {}
    for name, offload in OFFLOAD.items():
        with console.status(f"compiling, {name} offloaded"):
            found[name] = {
                str(tiles): widest(config, tiles, offload, hardware.memory_bytes)
                for tiles in (0, config.tiles)
            }
        table.add_row(name, *(f"{width:,}" for width in found[name].values()))
    console.print(f"the widest MLP on {config.target}, ZeRO 3")
    console.print(table)
    if config.write:
        console.print(write_result("tiled_width", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
