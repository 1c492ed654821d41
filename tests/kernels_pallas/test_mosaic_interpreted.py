"""Do the kernels, in Mosaic's CPU interpreter, do what plain JAX does, and no race?"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.backend import LEAST_JAX
from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    Plan,
    Tile,
    make_plan,
    reference,
)
from kernels_pallas.block_sparse_attention.operands import Limits
from kernels_pallas.block_sparse_attention.vjp import Implementation, attend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__ < LEAST_JAX, reason="the kernels need a later jax"
    ),
]

# Of the norm: rounding the weights to 11 bits and to 8, and the results.
TOLERANCE = {jnp.float16: 2e-3, jnp.bfloat16: 1.2e-2}


def mosaic() -> Implementation:
    """The kernels, on the CPU; races are looked for."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: PLC0415

    from kernels_pallas.block_sparse_attention.mosaic import api  # noqa: PLC0415

    params = plgpu.InterpretGPUParams(detect_races=True)
    return Implementation(
        functools.partial(api.forward, interpret=params),
        functools.partial(api.backward, interpret=params),
    )


def races_found() -> bool:
    """Of the last kernel."""
    # TODO(jax>=0.13): there is no public way yet.
    from jax._src.pallas.mosaic_gpu.interpret import (  # noqa: PLC0415
        interpret_pallas_call,
    )

    return interpret_pallas_call.get_races().races_found


def plan_of(layout: BlockLayout, seq_len: int, **options: Any) -> Plan:
    with warnings.catch_warnings(action="ignore"):  # of coarse tiles
        return make_plan(layout, seq_len, seq_len, tile=Tile(128, 128), **options)


def layout_of(block: int, num_blocks: int, heads: int, share: float) -> BlockLayout:
    rng = np.random.default_rng(block)
    blocks = rng.random((heads, num_blocks, num_blocks)) < share
    blocks[:, 0, 0] = True
    blocks[:, num_blocks // 2] = False  # queries that see nothing
    return BlockLayout(blocks, block)


CASES = {
    # name: layout, length, causal, longest, head size, heads of keys, dtype, limits
    "causal": (64, 4, 1, 250, True, None, 64, 2, jnp.float16, ""),
    "blocks of 16": (16, 16, 1, 256, True, None, 64, 2, jnp.float16, ""),
    "heads differ": (32, 8, 2, 256, False, None, 64, 1, jnp.float16, ""),
    "split rows": (128, 3, 1, 384, False, 1, 64, 2, jnp.float16, ""),
    "head 128": (128, 2, 1, 256, True, None, 128, 1, jnp.bfloat16, ""),
    "limits": (64, 4, 1, 250, True, None, 64, 2, jnp.float16, "segments lens"),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_do_what_the_reference_does(name: str) -> None:
    block, num, heads, length, causal, longest, size, kv_heads, dtype, kind = CASES[
        name
    ]
    layout = layout_of(block, num, heads, 0.6)
    plan = plan_of(layout, length, causal=causal, longest=longest)
    assert (plan.rows.num_parts > 0) == (longest is not None)
    rng = np.random.default_rng(0)

    def draw(num_heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((1, length, num_heads, size)), dtype)

    q, k, v, do = draw(2), draw(kv_heads), draw(kv_heads), draw(2)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (1, length)), axis=1), jnp.int32)
    limits = Limits(
        ids if "segments" in kind else None,
        ids if "segments" in kind else None,
        jnp.asarray([length - 40], jnp.int32) if "lens" in kind else None,
    )

    def run(implementation: Implementation, *given: jax.Array) -> tuple:
        def both(*given: jax.Array) -> Any:
            return attend(*given, limits, plan, size**-0.5, implementation)

        (o, lse), pull = jax.vjp(both, *given)
        found = pull((do.astype(o.dtype), jnp.zeros_like(lse)))
        return (o, *found), lse

    found, lse = run(mosaic(), q, k, v)
    assert not races_found()
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    plain = Implementation(reference.forward, reference.backward)
    wanted, wanted_lse = run(plain, *exact)
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(wanted_lse))
    seen = np.isfinite(wanted_lse)
    np.testing.assert_allclose(lse[seen], wanted_lse[seen], rtol=1e-4, atol=1e-3)
    for what, one, other in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        error = jnp.linalg.norm(one.astype(jnp.float32) - other)
        relative = float(error / jnp.linalg.norm(other))
        assert relative < TOLERANCE[dtype], (what, relative)
    nothing = ~np.asarray(seen)[0].T
    assert not np.asarray(found[0])[0][nothing].any()
    assert not np.asarray(found[1])[0][nothing].any()
