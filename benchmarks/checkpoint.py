"""What does a checkpoint cost, beside copying, writing and reading the same bytes?

States of 0.5 and 2 GB on eight CPU devices, all of it on one disk, taking turns in one
run: how long training is held by an asynchronous save (the mark: 1.1 times a copy of
the shards, and 50 ms), the whole save (1.25 times writing and syncing the shards), the
restore (1.25 times reading them), each verified; verifying alone (10 % of the save);
the same arrays read by TensorStore alone, which a restore uses; and bare Orbax, which
verifies and syncs nothing; and a copy in memory. Medians.

    python benchmarks/checkpoint.py --folder /path/on/the/disk
"""

import dataclasses
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from jaxpar.checkpoint import Checkpoints, MemoryTier
from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint.arrays import ARRAYS
from jaxpar.checkpoint.logs import quiet_orbax
from jaxpar.cli.recipe_flags import parse
from jaxpar.mesh import MeshShape, make_mesh

LEAVES, WIDTH, DEVICES = 24, 1024, 8


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured, and where."""

    folder: Path = Path(".")
    """On the disk; a temporary folder is made in it, and deleted."""
    gigabytes: tuple[float, ...] = (0.5, 2.0)
    """Sizes of the state; the result is written for the default ones only."""
    repeats: int = 5
    """Turns of each."""


def make_state(gigabytes: float) -> dict[str, jax.Array]:
    """Random fp32 leaves, sharded over the devices."""
    sharding = NamedSharding(make_mesh(MeshShape(data=DEVICES)), P("data"))
    rows = int(gigabytes * 1e9 / 4 / LEAVES / WIDTH) // DEVICES * DEVICES
    make = jax.jit(
        lambda key: jax.random.normal(key, (rows, WIDTH)), out_shardings=sharding
    )
    return {f"leaf{i}": make(jax.random.key(i)) for i in range(LEAVES)}


def shards_of(state: dict[str, jax.Array]) -> list[Any]:
    """Every shard, as jax holds it."""
    return [shard.data for leaf in state.values() for shard in leaf.addressable_shards]


class Turns:
    """Seconds of each thing, turn by turn."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, run: Callable[[], Any]) -> Any:
        """Run once, and keep how long it took."""
        began = time.perf_counter()
        result = run()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def medians(self) -> dict[str, float]:
        """Of all turns."""
        return {name: statistics.median(x) for name, x in self.seconds.items()}


def raw_turn(turns: Turns, state: dict[str, jax.Array], folder: Path) -> None:
    """Copy, write and sync, read the shards."""
    copied = turns.time(
        "copy", lambda: [np.array(shard, copy=True) for shard in shards_of(state)]
    )
    folder.mkdir()

    def write() -> None:
        for i, shard in enumerate(copied):
            with (folder / str(i)).open("wb") as file:
                file.write(shard.data)
                file.flush()
                os.fsync(file.fileno())

    turns.time("write and sync", write)
    del copied
    count = len(list(folder.iterdir()))
    turns.time(
        "read", lambda: [np.fromfile(folder / str(i), np.float32) for i in range(count)]
    )
    shutil.rmtree(folder)


def our_turn(turns: Turns, state: dict[str, jax.Array], folder: Path) -> None:
    """Save, verify and restore by jaxpar."""
    checkpoints = Checkpoints(folder)
    began = time.perf_counter()
    turns.time("jaxpar, held", lambda: checkpoints.save(1, state))
    checkpoints.wait()
    turns.seconds.setdefault("jaxpar, save", []).append(time.perf_counter() - began)
    step = files.step_path(folder, 1)
    turns.time("jaxpar, verify", lambda: files.verified(step, 1))
    target = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in state.items()
    }
    turns.time("TensorStore, read", lambda: read_by_tensorstore(step / ARRAYS, state))
    restored = turns.time(
        "jaxpar, restore",
        lambda: jax.block_until_ready(Checkpoints(folder).restore(target).tree),
    )
    for name, leaf in state.items():
        assert np.array_equal(restored[name], leaf), "what was saved comes back"
    checkpoints.close()
    shutil.rmtree(folder)


def memory_turn(turns: Turns, state: dict[str, jax.Array], folder: Path) -> None:
    """Keep in memory, whose pages are there from the second copy on, and restore."""
    folder.mkdir()
    tier, began = MemoryTier(folder), 0.0
    for step in range(4):
        began = time.perf_counter()
        if step < 2:
            tier.save(step, state)
        else:
            turns.time("memory, held", lambda step=step: tier.save(step, state))
        tier.wait()
    turns.seconds.setdefault("memory, whole", []).append(time.perf_counter() - began)
    turns.time("memory, restore", lambda: jax.block_until_ready(tier.restore(state)))
    tier.close(delete=True)
    shutil.rmtree(folder)


def read_by_tensorstore(folder: Path, names: Iterable[str]) -> list[np.ndarray]:
    """Read whole arrays into the host's memory, all at once."""
    store = {"driver": "ocdbt", "base": f"file://{folder}/"}
    opened = [
        ts.open({"driver": "zarr", "kvstore": {**store, "path": name}}, open=True)
        for name in names
    ]
    reads = [each.result().read() for each in opened]
    return [each.result() for each in reads]


def orbax_turn(turns: Turns, state: dict[str, jax.Array], folder: Path) -> None:
    """Save and restore by Orbax's own checkpointer, as its guide does."""
    with ocp.StandardCheckpointer() as checkpointer:
        began = time.perf_counter()
        turns.time("Orbax, held", lambda: checkpointer.save(folder, state))
        checkpointer.wait_until_finished()
        turns.seconds.setdefault("Orbax, save", []).append(time.perf_counter() - began)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        turns.time(
            "Orbax, restore",
            lambda: jax.block_until_ready(checkpointer.restore(folder, target)),
        )
    shutil.rmtree(folder)


def measure(gigabytes: float, config: Config, folder: Path) -> dict[str, Any]:
    """Take turns; medians, ratios to the marks' own measures, and memory."""
    state = jax.block_until_ready(make_state(gigabytes))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    turns = Turns()
    for _ in range(config.repeats):
        raw_turn(turns, state, folder / "raw")
        our_turn(turns, state, folder / "ours")
        orbax_turn(turns, state, folder / "orbax")
        memory_turn(turns, state, folder / "memory")
    found = turns.medians()
    return {
        "gigabytes": sum(leaf.nbytes for leaf in state.values()) / 1e9,
        "seconds": found,
        "turns": turns.seconds,
        "held_over_copy_less_50_ms": (found["jaxpar, held"] - 0.05) / found["copy"],
        "save_over_write": found["jaxpar, save"] / found["write and sync"],
        "restore_over_read": found["jaxpar, restore"] / found["read"],
        "tensorstore_over_read": found["TensorStore, read"] / found["read"],
        "memory_held_over_copy": found["memory, held"] / found["copy"],
        "verify_over_save": found["jaxpar, verify"] / found["jaxpar, save"],
        "peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "host_gb_before": before / 1e6,
    }


def main(config: Config) -> None:
    """Measure, print, write."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    quiet_orbax()
    console = Console(highlight=False)
    found = {}
    with tempfile.TemporaryDirectory(dir=config.folder, prefix="checkpoint-") as made:
        for gigabytes in config.gigabytes:
            row = measure(gigabytes, config, Path(made).absolute())
            found[f"{gigabytes:g} GB"] = row
            table = Table(f"{row['gigabytes']:.2f} GB", box=box.SIMPLE)
            table.add_column("s", justify="right")
            for name, seconds in row["seconds"].items():
                table.add_row(name, f"{seconds:.3f}")
            console.print(table)
            for name, mark in (
                ("held_over_copy_less_50_ms", 1.1),
                ("save_over_write", 1.25),
                ("restore_over_read", 1.25),
                ("verify_over_save", 0.1),
            ):
                console.print(f"{name}: {row[name]:.3f} (mark {mark})")
            over = row["tensorstore_over_read"]
            console.print(f"tensorstore_over_read: {over:.3f}")
            console.print(f"peak of host memory: {row['peak_host_gb']:.2f} GB")
    if config == dataclasses.replace(Config(), folder=config.folder):
        console.print(write_result("checkpoint", found))


if __name__ == "__main__":
    main(parse(Config, __doc__))
