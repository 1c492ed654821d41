"""How fast is block-sparse attention on a Hopper GPU, beside cuDNN's dense attention?

Batch x tokens is 32,768 throughout. Measured in the same run, and what the rest is held
against: the bandwidth of a large copy, and cuDNN's causal attention, forward and with
its backward pass. The mark of a pattern is the time of dense attention, times the share
of active tiles, over 0.85 (0.75 where rows have fewer than 16, or are split).

Without a GPU every kernel is compiled for an H200, and the shares of tiles are printed.

    python benchmarks/kernels_gpu.py --part dense
"""

import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(sys.prefix) / "compilers"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from benchmarks.record import write_result
from benchmarks.train_gpu import gpu_name
from jaxpar.config import parse
from jaxpar.plan.deviceless import gpu_devices, prepare_process
from jaxpar.sparse_attention import causal_pattern, make_layout
from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    Plan,
    block_sparse_attention,
    make_plan,
)
from kernels_pallas.block_sparse_attention.api import KERNEL_TILE

TOKENS, HEADS, BLOCK = 32_768, 16, 128
SPARSE_MARK, FEW_TILES_MARK, MANY_TILES = 0.85, 0.75, 16
PARTS = ("dense", "window", "patterns", "random")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure, and for how long."""

    part: str = ""
    """dense, window, patterns or random; empty: all, one after the other."""
    size: int = 128
    """Of a head: 64 or 128."""
    rounds: int = 20
    """Timed calls of each; the median counts."""
    write: bool = True
    """Write benchmarks/results/kernels_gpu_PART.json, where there is a GPU."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention at a length: dense where there is no layout."""

    name: str
    seq_len: int
    layout: BlockLayout
    window: int | None = None

    @property
    def plan(self) -> Plan:
        """On the kernels' tiles."""
        length = self.seq_len
        return make_plan(self.layout, length, length, causal=True, tile=KERNEL_TILE)


def named(name: str, pattern: str, seq_len: int, window: int = 512) -> Case:
    """A case of one of the library's patterns."""
    sizes = {"block": BLOCK, "window": window, "global_tokens": BLOCK}
    layout = make_layout(causal_pattern(pattern, num_heads=HEADS, **sizes), seq_len)
    return Case(name, seq_len, layout, window if pattern == "sliding" else None)


def random_case(one_in: int, seq_len: int) -> Case:
    """A share of the blocks of the past, and each token's own."""
    blocks = seq_len // BLOCK
    drawn = np.random.default_rng(0).random((HEADS, blocks, blocks)) < 1 / one_in
    drawn |= np.eye(blocks, dtype=bool)
    layout = BlockLayout(drawn & np.tri(blocks, dtype=bool), BLOCK)
    return Case(f"random 1/{one_in}", seq_len, layout)


def cases_of(part: str) -> Iterator[Case]:
    """What a part measures."""
    if part == "dense":
        for length in (4096, 8192, 16_384, 32_768, 65_536):
            yield named(f"dense {length}", "dense", length)
    elif part == "window":
        for window in (512, 2048):
            for length in (8192, 32_768):
                yield named(f"window {window} {length}", "sliding", length, window)
    elif part == "patterns":
        for pattern in ("fixed", "bigbird", "longformer"):
            for length in (8192, 32_768):
                yield named(f"{pattern} {length}", pattern, length)
    elif part == "random":
        yield from (random_case(one_in, 16_384) for one_in in (2, 4, 8, 16))
    else:
        raise ValueError(f"--part {part!r}: must be one of {', '.join(PARTS)}.")


def sparse(plan: Plan) -> Callable[..., jax.Array]:
    """Our kernels."""
    return lambda q, k, v: block_sparse_attention(
        q, k, v, plan, implementation="mosaic"
    )


def cudnn(window: int | None = None) -> Callable[..., jax.Array]:
    """cuDNN's kernels, which know the causal mask and a window of it."""
    local = None if window is None else (window, 0)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=local, implementation="cudnn"
        )

    return attend


def with_backward(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Forward and backward pass, of a given cotangent."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, pull(do)

    return run


def seconds(call: Callable[..., Any], args: tuple, rounds: int) -> float:
    """Median time of a compiled call, after three that do not count."""
    compiled = jax.jit(call)
    for _ in range(3):
        jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def shapes_of(seq_len: int, size: int) -> tuple[int, ...]:
    """Of queries, keys and values."""
    return (max(1, TOKENS // seq_len), seq_len, HEADS, size)


def operands(seq_len: int, size: int) -> tuple[jax.Array, ...]:
    """Random q, k, v and do."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = shapes_of(seq_len, size)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)


def copy_bandwidth(rounds: int) -> float:
    """Bytes a second, read and written, of a gigabyte."""
    x = jnp.zeros(1 << 28, jnp.float32)
    return 2 * x.nbytes / seconds(lambda x: x + 1.0, (x,), rounds)


def measure(case: Case, config: Config) -> dict[str, float]:
    """Times of a case beside cuDNN's dense, and its own window where it has one."""
    args = operands(case.seq_len, config.size)
    runs = {"sparse": sparse(case.plan), "cudnn": cudnn()}
    if case.window is not None:
        runs["cudnn_window"] = cudnn(case.window)
    found = {}
    for name, attend in runs.items():
        found[f"{name}_forward_ms"] = 1e3 * seconds(attend, args[:3], config.rounds)
        both = with_backward(attend)
        found[f"{name}_both_ms"] = 1e3 * seconds(both, args, config.rounds)
    return found


def compile_for_h200(case: Case, config: Config) -> dict[str, float]:
    """Compile the kernels for a GPU that is not here."""
    mesh = Mesh(np.array(gpu_devices("h200", 1, 1)[:1]), ("all",))
    whole = NamedSharding(mesh, P())
    shape = shapes_of(case.seq_len, config.size)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(with_backward(sparse(case.plan))).trace(x, x, x, x)
        memory = traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    assert memory is not None
    return {
        "compiled_in_seconds": time.perf_counter() - began,
        "temporaries_mb": memory.temp_size_in_bytes / 1e6,
    }


def share_and_mark(case: Case, dense: Plan) -> dict[str, float]:
    """Active tiles over those of causal dense attention, and what that should bring."""
    plan = case.plan
    share = plan.active_tiles / dense.active_tiles
    tiles_a_row = plan.active_tiles * plan.tiles_k
    is_few = (
        tiles_a_row < MANY_TILES or plan.rows.num_parts + plan.columns.num_parts > 0
    )
    return {
        "active_blocks": plan.active_blocks,
        "active_tiles": plan.active_tiles,
        "share_of_dense": share,
        "tiles_a_row": tiles_a_row,
        "mark_of_dense_time": share / (FEW_TILES_MARK if is_few else SPARSE_MARK),
    }


def run_part(part: str, config: Config, console: Console, *, on_gpu: bool) -> None:
    """Measure a part, or compile it, and print a table."""
    measured: dict[str, Any] = {"size": config.size}
    if on_gpu:
        measured["copy_gb_per_second"] = copy_bandwidth(config.rounds) / 1e9
    table = Table(title=f"{part}, heads of {config.size}", box=None)
    rows = []
    for case in cases_of(part):
        dense = named("dense", "dense", case.seq_len).plan
        found = share_and_mark(case, dense)
        found |= measure(case, config) if on_gpu else compile_for_h200(case, config)
        if on_gpu:
            found["of_cudnn_forward"] = (
                found["cudnn_forward_ms"] / found["sparse_forward_ms"]
            )
            found["of_cudnn_both"] = found["cudnn_both_ms"] / found["sparse_both_ms"]
        measured[case.name] = found
        rows.append((case.name, found))
        console.print(f"{case.name}: done", style="dim")
    columns = [name for name in rows[0][1] if all(name in found for _, found in rows)]
    for name in ("", *columns):
        table.add_column(name.replace("_", " "), justify="right")
    for name, found in rows:
        table.add_row(name, *(f"{found[column]:.4g}" for column in columns))
    console.print(table)
    if on_gpu and config.write:
        console.print(f"written  {write_result(f'kernels_gpu_{part}', measured)}")


def main(config: Config) -> None:
    """Measure or compile, part after part."""
    console = Console(highlight=False, soft_wrap=True)
    on_gpu = gpu_name() is not None
    if not on_gpu:
        prepare_process()
        console.print("no GPU here: compiled for an H200, nothing is timed")
    warnings.simplefilter("ignore", UserWarning)  # Of coarse tiles; they are printed.
    for part in (config.part,) if config.part else PARTS:
        run_part(part, config, console, on_gpu=on_gpu)


if __name__ == "__main__":
    main(parse(Config, __doc__))
