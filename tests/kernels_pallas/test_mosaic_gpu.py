"""On a GPU: do the kernels do what plain JAX does, at 4,096 tokens?

pytest --gpu tests/kernels_pallas/test_mosaic_gpu.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.sparse_attention import causal_pattern, make_layout
from kernels_pallas.backend import has_kernels
from kernels_pallas.block_sparse_attention import block_sparse_attention, make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:blocks of 16 on tiles"),
]

LENGTH, BATCH, HEADS, KV_HEADS = 4096, 2, 4, 2
# Of the norm: rounding the weights to 11 bits and to 8, and the results.
TOLERANCE = {jnp.float16: 2e-3, jnp.bfloat16: 1.2e-2}


@pytest.mark.parametrize("limits", ["", "segments", "lens"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("name", ["dense", "fixed", "bigbird", "longformer", "sliding"])
def test_kernels_do_what_the_reference_does(
    name: str, block: int, size: int, dtype: Any, limits: str
) -> None:
    if not has_kernels():
        pytest.skip("no Hopper GPU, or an older jax")
    sizes = {"block": block, "window": 512, "global_tokens": 128}
    layout = make_layout(causal_pattern(name, num_heads=HEADS, **sizes), LENGTH)
    plan = make_plan(layout, LENGTH, LENGTH, causal=True)
    rng = np.random.default_rng()
    q, do = (draw(rng, HEADS, size) for _ in range(2))
    k, v = (draw(rng, KV_HEADS, size) for _ in range(2))
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (BATCH, LENGTH)), axis=1))
    options = {
        "segment_ids": ids if limits == "segments" else None,
        "kv_seq_lens": jnp.array([LENGTH, 1000]) if limits == "lens" else None,
    }

    def run(implementation: str, *given: jax.Array) -> tuple[jax.Array, ...]:
        def attend(*given: jax.Array) -> jax.Array:
            return block_sparse_attention(
                *given, plan, implementation=implementation, **options
            )

        o, pull = jax.vjp(attend, *given)
        return (o, *pull(do.astype(o.dtype)))

    found = jax.jit(run, static_argnums=0)(
        "mosaic", *(x.astype(dtype) for x in (q, k, v))
    )
    rounded = [x.astype(dtype).astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(run, static_argnums=0)("reference", *rounded)
    for what, one, other in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        error = jnp.linalg.norm(one.astype(jnp.float32) - other)
        relative = float(error / jnp.linalg.norm(other))
        assert relative < TOLERANCE[dtype], (what, relative)


def draw(rng: np.random.Generator, heads: int, size: int) -> jax.Array:
    drawn = rng.standard_normal((BATCH, LENGTH, heads, size), np.float32)
    return jnp.asarray(drawn)
