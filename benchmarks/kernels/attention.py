"""Attention: our kernels on a pattern, beside cuDNN, XLA with a mask, and torch.

Batch x tokens is 32,768, or one sequence where it is longer. The mark of a pattern is
the time of cuDNN's causal attention, times the share of active tiles, over 0.85 (0.75
where rows have fewer than 16, or are split).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.timing import compile_for_h200, seconds
from jaxpar.sparse_attention import causal_pattern, make_layout
from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    TileWork,
    block_sparse_attention,
    make_tile_work,
)
from kernels_pallas.block_sparse_attention.api import KERNEL_TILE

TOKENS, HEADS, BLOCK = 32_768, 16, 128
SPARSE_MARK, FEW_TILES_MARK, MANY_TILES = 0.85, 0.75, 16
LONGEST_MASKED = 8192
"""Tokens of a sequence whose scores can all be held."""
PARTS = ("dense", "window", "patterns", "random")
PASSES = ("forward", "both")


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention at a length."""

    name: str
    seq_len: int
    layout: BlockLayout
    window: int | None = None
    tokens: int = TOKENS

    @functools.cached_property
    def work(self) -> TileWork:
        """On the kernels' tiles."""
        length = self.seq_len
        return make_tile_work(
            self.layout, length, length, causal=True, tile=KERNEL_TILE
        )

    def shape(self, size: int) -> tuple[int, ...]:
        """Of queries, keys and values."""
        heads = len(self.layout.blocks)
        return (max(1, self.tokens // self.seq_len), self.seq_len, heads, size)


def named(name: str, pattern: str, seq_len: int, window: int = 512) -> Case:
    """A case of one of the library's patterns."""
    sizes = {"block": BLOCK, "window": window, "global_tokens": BLOCK}
    layout = make_layout(causal_pattern(pattern, num_heads=HEADS, **sizes), seq_len)
    return Case(name, seq_len, layout, window if pattern == "sliding" else None)


def toy_case(part: str) -> Case:
    """What takes a moment on a CPU, of a part; its name is the part's."""
    pattern = "sliding" if part == "toy window" else "fixed"
    sizes = {"block": BLOCK, "window": BLOCK, "global_tokens": BLOCK}
    layout = make_layout(causal_pattern(pattern, num_heads=2, **sizes), 4 * BLOCK)
    return Case(part, 4 * BLOCK, layout, BLOCK if pattern == "sliding" else None, 1)


def random_case(one_in: int, seq_len: int) -> Case:
    """A share of the blocks of the past, and each token's own."""
    blocks = seq_len // BLOCK
    drawn = np.random.default_rng(0).random((HEADS, blocks, blocks)) < 1 / one_in
    past, own = np.tri(blocks, dtype=bool), np.eye(blocks, dtype=bool)
    layout = BlockLayout((drawn | own) & past, BLOCK)
    return Case(f"random 1/{one_in} {seq_len}", seq_len, layout)


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
        yield toy_case(part)


def measure(
    case: Case,
    size: int,
    rounds: int,
    torch: Mapping[str, float],
    *,
    on_gpu: bool = True,
) -> dict[str, float]:
    """Times beside cuDNN's causal, its own window where it has one, and XLA's mask.

    Args:
      case: what is attended to.
      size: of a head.
      rounds: timed rounds of each.
      torch: milliseconds that torch's contestants took for the same.
      on_gpu: whether kernels are compared; else what stands for them on a CPU.

    Returns:
      Milliseconds, and ratios: ``A_of_B`` is B's time over A's.
    """
    shape = case.shape(size)
    found = share_and_mark(case) | dict(torch)
    ours, theirs = ("mosaic", "cudnn") if on_gpu else ("reference", "xla")
    found |= times_of("sparse", sparse(case.work, ours), shape, rounds)
    at_once = sparse(case.work, ours, deterministic=False)
    found |= times_of("sparse_unordered", at_once, shape, rounds, ("both",))
    found |= dense_times(shape, rounds, theirs)
    if case.window is not None:
        window = cudnn(case.window, theirs)
        found |= times_of("cudnn_window", window, shape, rounds)
    if case.seq_len <= LONGEST_MASKED:
        passes = ("forward",)
        found |= times_of("xla_masked", masked(case), shape, rounds, passes)
    return found | ratios_of(found)


def times_of(
    name: str,
    attend: Callable[..., jax.Array],
    shape: tuple[int, ...],
    rounds: int,
    passes: tuple[str, ...] = PASSES,
) -> dict[str, float]:
    """Milliseconds of a contestant; without those that it fails at, which is told."""
    args, found = operands(shape), {}
    for of in passes:
        call, given = (
            (attend, args[:3]) if of == "forward" else (with_backward(attend), args)
        )
        try:
            found[f"{name}_{of}_ms"] = 1e3 * seconds(call, given, rounds)
        except jax.errors.JaxRuntimeError as error:
            print(f"{name} {of} at {shape}: {str(error).splitlines()[0]}", flush=True)
    return found


@functools.cache
def dense_times(
    shape: tuple[int, ...], rounds: int, implementation: str
) -> dict[str, float]:
    """Of cuDNN's causal attention, which several cases are compared with."""
    return times_of("cudnn", cudnn(None, implementation), shape, rounds)


def ratios_of(found: Mapping[str, float]) -> dict[str, float]:
    """Everybody's speed over cuDNN's dense attention's, and ours over all others'."""
    ratios = {}
    for of in PASSES:
        times = {
            column.removesuffix(f"_{of}_ms"): taken
            for column, taken in found.items()
            if column.endswith(f"_{of}_ms")
        }
        for one, taken in times.items():
            for other in times if one == "sparse" else ("cudnn",):
                if other in times and other != one:
                    ratios[f"{one}_of_{other}_{of}"] = times[other] / taken
    return ratios


def compiled(case: Case, size: int) -> dict[str, float]:
    """What forward and backward pass compile to for an H200 that is not here."""
    x = jax.ShapeDtypeStruct(case.shape(size), jnp.bfloat16)
    call = with_backward(sparse(case.work))
    found = compile_for_h200(call, (x,) * 4)
    del found["moved_gb"]  # What kernels move is up to their lists.
    return share_and_mark(case) | found


def share_and_mark(case: Case) -> dict[str, float]:
    """Active tiles over those of causal dense attention, and what that should bring."""
    work, dense = case.work, named("dense", "dense", case.seq_len).work
    share = work.active_tiles / dense.active_tiles
    tiles_a_row = work.active_tiles * work.tiles_k
    num_parts = work.rows.num_parts + work.columns.num_parts
    is_few = tiles_a_row < MANY_TILES or num_parts > 0
    return {
        "active_blocks": work.active_blocks,
        "active_tiles": work.active_tiles,
        "share_of_dense": share,
        "tiles_a_row": tiles_a_row,
        "mark_of_dense_time": share / (FEW_TILES_MARK if is_few else SPARSE_MARK),
    }


def sparse(
    work: TileWork, implementation: Any = "mosaic", *, deterministic: bool = True
) -> Callable[..., jax.Array]:
    """Our kernels."""
    return lambda q, k, v: block_sparse_attention(
        q, k, v, work, deterministic=deterministic, implementation=implementation
    )


def cudnn(
    window: int | None = None, implementation: Any = "cudnn"
) -> Callable[..., jax.Array]:
    """cuDNN's kernels, which know the causal mask and a window of it."""
    local = None if window is None else (window, 0)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=local,
            implementation=implementation,
        )

    return attend


def masked(case: Case) -> Callable[..., jax.Array]:
    """XLA's attention, which works out all scores and masks them."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        blocks = jnp.asarray(case.layout.blocks)
        mask = blocks.repeat(BLOCK, 1).repeat(BLOCK, 2)[None]
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=True, implementation="xla"
        )

    return attend


def with_backward(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Forward and backward pass, of a given cotangent."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, pull(do)

    return run


def operands(shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Random q, k, v and do."""
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
