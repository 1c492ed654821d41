"""On a GPU: do the kernels do what plain JAX does, at about 4,096 tokens?

pytest --gpu tests/kernels_pallas/test_mosaic_gpu.py
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.sparse_attention import BigBird, BSLongformer, causal_pattern, make_layout
from kernels_pallas.backend import has_kernels
from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    TileWork,
    block_sparse_attention,
    make_tile_work,
)
from tests.kernels_pallas.marks import needs_mosaic

pytestmark = [
    pytest.mark.gpu,
    needs_mosaic,
    pytest.mark.filterwarnings("ignore:blocks of 16 on tiles"),
]

LENGTH, BATCH, HEADS, KV_HEADS = 4096, 2, 4, 2
# Of the norm: rounding the weights to 11 bits and to 8, and the results.
TOLERANCE = {jnp.float16: 2e-3, jnp.bfloat16: 1.2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention by tile work, of all heads or of those from one on."""

    work: TileWork
    size: int = 128
    dtype: Any = jnp.bfloat16
    lens: tuple[int, ...] | None = None
    has_segments: bool = False
    first_head: int | None = None
    deterministic: bool = True


def causal(name: str, block: int, seq_len: int = LENGTH) -> TileWork:
    sizes = {"block": block, "window": 512, "global_tokens": 128}
    whole = -(-seq_len // block) * block
    layout = make_layout(causal_pattern(name, num_heads=HEADS, **sizes), whole)
    return make_tile_work(layout, seq_len, seq_len, causal=True)


def both_ways(pattern: Any, **options: Any) -> TileWork:
    layout = make_layout(pattern, LENGTH)
    return make_tile_work(layout, LENGTH, LENGTH, causal=False, **options)


def keys_of_their_own(seq_k: int) -> TileWork:
    rng = np.random.default_rng(0)
    blocks = rng.random((HEADS, LENGTH // 64, -(-seq_k // 64))) < 0.6
    return make_tile_work(BlockLayout(blocks, 64), LENGTH, seq_k, causal=False)


def of_pattern(name: str) -> dict[str, Callable[[], Case]]:
    """A pattern with all kinds of limits."""
    return {
        name: lambda: Case(causal(name, 128)),
        f"{name}, segments, blocks of 16": lambda: Case(
            causal(name, 16), 64, jnp.float16, has_segments=True
        ),
        f"{name}, lengths": lambda: Case(causal(name, 128), 64, lens=(LENGTH, 1000)),
    }


WINDOW = {"block": 128, "num_sliding_window_blocks": 5}
DIFFER = {"different_layout_per_head": True, **WINDOW}
CASES = {
    **of_pattern("dense"),
    **of_pattern("fixed"),
    **of_pattern("bigbird"),
    **of_pattern("longformer"),
    **of_pattern("sliding"),
    "split rows": lambda: Case(both_ways(BSLongformer(HEADS, **WINDOW), longest=4)),
    "heads differ": lambda: Case(both_ways(BigBird(HEADS, **DIFFER)), 64, jnp.float16),
    "one pass": lambda: Case(causal("bigbird", 64), deterministic=False),
    "one pass, lengths": lambda: Case(
        causal("longformer", 128), lens=(LENGTH, 1000), deterministic=False
    ),
    "one pass, heads of 64": lambda: Case(
        causal("bigbird", 64), 64, has_segments=True, deterministic=False
    ),
    "heads of 256": lambda: Case(causal("bigbird", 64), 256, has_segments=True),
    "heads of 160, lengths": lambda: Case(
        causal("fixed", 128), 160, jnp.float16, lens=(LENGTH, 1000)
    ),
    "some heads": lambda: Case(
        both_ways(BigBird(2 * HEADS, **DIFFER)), first_head=HEADS
    ),
    "a last tile that is short": lambda: Case(causal("bigbird", 16, 4000), 64),
    "no keys, and more than there are": lambda: Case(
        causal("fixed", 64), lens=(0, 5000)
    ),
    "keys of their own": lambda: Case(keys_of_their_own(2000), 64, lens=(2000, 1999)),
}


def both_passes(case: Case) -> Callable[..., tuple[jax.Array, ...]]:
    """Make ``(implementation, operands, limits) -> (o, dq, dk, dv)``."""

    def run(
        implementation: str, given: list[jax.Array], limits: dict[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        def attend(*given: jax.Array) -> jax.Array:
            return block_sparse_attention(
                *given,
                case.work,
                deterministic=case.deterministic,
                implementation=implementation,
                **limits,
            )

        *qkv, do = given
        o, pull = jax.vjp(attend, *qkv)
        return (o, *pull(do))

    return run


def operands(case: Case) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Random q, k, v and do, in fp32, and what limits them."""
    rng = np.random.default_rng()
    work = case.work
    shapes = [(work.seq_q, HEADS), *2 * [(work.seq_k, KV_HEADS)], (work.seq_q, HEADS)]
    drawn = [
        rng.standard_normal((BATCH, *shape, case.size), np.float32) for shape in shapes
    ]
    limits = {}
    if case.has_segments:
        ids = np.sort(rng.integers(0, 4, (BATCH, work.seq_q)), axis=1)
        limits["segment_ids"] = jnp.asarray(ids, jnp.int32)
    if case.lens is not None:
        limits["kv_seq_lens"] = jnp.asarray(case.lens)
    if case.first_head is not None:
        limits["first_head"] = jnp.int32(case.first_head)
    return [jnp.asarray(x, case.dtype).astype(jnp.float32) for x in drawn], limits


@pytest.mark.parametrize("name", CASES)
def test_kernels_do_what_the_reference_does(name: str) -> None:
    if not has_kernels():
        pytest.skip("needs a Hopper GPU")
    case = CASES[name]()
    exact, limits = operands(case)
    compiled = jax.jit(both_passes(case), static_argnums=0)
    found = compiled("mosaic", [x.astype(case.dtype) for x in exact], limits)
    with jax.default_matmul_precision("highest"):
        wanted = compiled("reference", exact, limits)
    for what, one, other in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        error = jnp.linalg.norm(one.astype(jnp.float32) - other)
        relative = float(error / jnp.linalg.norm(other))
        assert relative < TOLERANCE[case.dtype], (what, relative)
