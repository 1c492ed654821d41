"""Do the kernels lower for CUDA where there is no GPU, in every configuration?"""

import functools
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxpar.jaxprs.evaluate import flops
from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    block_sparse_attention,
    make_tile_work,
)
from kernels_pallas.block_sparse_attention.api import KERNEL_TILE
from tests.kernels_pallas import test_mosaic_gpu
from tests.kernels_pallas.marks import needs_mosaic

pytestmark = [
    pytest.mark.filterwarnings("ignore:blocks of 16 on tiles"),
    needs_mosaic,
]

LENGTH, HEADS = 512, 4
H200 = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
DTYPES = (jnp.bfloat16, jnp.float16)
CONFIGURATIONS = list(
    itertools.product(
        DTYPES,
        (64, 128, 256),
        (16, 128),
        ("", "segments", "lens"),
        (None, 1),
        (1, HEADS),
    )
)


def lowered(
    dtype: Any,
    size: int,
    block: int,
    limits: str,
    longest: int | None,
    heads: int,
    implementation: str | None = "mosaic",
    *,
    deterministic: bool = True,
) -> str:
    """The text of forward and backward pass for an H200, by what users call."""
    rng = np.random.default_rng(0)
    blocks = rng.random((heads, LENGTH // block, LENGTH // block)) < 0.5
    with warnings.catch_warnings(action="ignore"):  # of coarse tiles
        layout = BlockLayout(blocks, block)
        options = {"tile": KERNEL_TILE, "longest": longest}
        work = make_tile_work(layout, LENGTH, LENGTH, causal=True, **options)
    q = jax.ShapeDtypeStruct((2, LENGTH, HEADS, size), dtype)
    k = jax.ShapeDtypeStruct((2, LENGTH, HEADS // 2, size), dtype)
    ids = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    lens = jax.ShapeDtypeStruct((2,), jnp.int32)

    def loss(q, k, v, ids, lens):
        o = block_sparse_attention(
            q,
            k,
            v,
            work,
            segment_ids=ids if limits == "segments" else None,
            kv_seq_lens=lens if limits == "lens" else None,
            deterministic=deterministic,
            implementation=implementation,
        )
        return o.astype(jnp.float32).sum()

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, ids, lens)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_items_are_the_outermost_dim_of_every_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the longest items of all heads start first: GPUs start grids in order."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: PLC0415

    make, grids = plgpu.kernel, []

    def watched(*args: Any, **options: Any) -> Any:
        grids.append(dict(zip(options["grid_names"], options["grid"], strict=True)))
        return make(*args, **options)

    monkeypatch.setattr(plgpu, "kernel", watched)
    lowered(jnp.bfloat16, 64, 128, "", None, 1)
    assert [tuple(grid) for grid in grids] == 3 * [("item", "head", "row")]
    assert [tuple(grid.values())[1:] for grid in grids] == [
        (HEADS, 2),
        (HEADS, 2),
        (HEADS // 2, 2),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_configuration_lowers(configuration: tuple) -> None:
    kernels = 4 if configuration[1] == 256 else 3
    assert lowered(*configuration).count("mosaic_gpu_v2") == kernels


@pytest.mark.slow
@pytest.mark.parametrize("name", test_mosaic_gpu.CASES)
def test_what_is_run_on_a_gpu_lowers(name: str) -> None:
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        case = test_mosaic_gpu.CASES[name]()
        exact, limits = jax.eval_shape(lambda: test_mosaic_gpu.operands(case))
        given = [jax.ShapeDtypeStruct(x.shape, case.dtype) for x in exact]
        run = jax.jit(test_mosaic_gpu.both_passes(case), static_argnums=0)
        traced = run.trace("mosaic", given, limits)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    passes = 3 if case.deterministic else 2
    assert text.count("mosaic_gpu_v2") == (4 if case.size > 128 else passes)


@pytest.mark.parametrize(
    ("size", "apart", "at_once"), [(128, 3 + 4, 5), (256, 3 + 3 + 2, 3 + 3 + 2)]
)
def test_operations_are_those_of_the_active_tiles(
    size: int, apart: int, at_once: int
) -> None:
    """Two products of each forward, and those of each backward pass, of every head."""
    layout = BlockLayout(np.tri(4, dtype=bool), 128)
    work = make_tile_work(layout, LENGTH, LENGTH, causal=True, tile=KERNEL_TILE)
    x = jax.ShapeDtypeStruct((2, LENGTH, HEADS, size), jnp.bfloat16)

    def attend(q, k, v, **options):
        return block_sparse_attention(q, k, v, work, **options, implementation="mosaic")

    def pull(q, k, v, do, **options):
        return jax.vjp(functools.partial(attend, **options), q, k, v)[1](do)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        forward = jax.make_jaxpr(attend)(x, x, x)
        both = jax.make_jaxpr(pull)(x, x, x, x)
        pull_at_once = functools.partial(pull, deterministic=False)
        in_any_order = jax.make_jaxpr(pull_at_once)(x, x, x, x)
    of_a_product = 2 * 2 * HEADS * 10 * 128 * 128 * size
    assert flops(forward.eqns) == 2 * of_a_product
    of_delta = 2 * 2 * HEADS * LENGTH * size
    assert flops(both.eqns) == (2 + apart) * of_a_product + of_delta
    assert flops(in_any_order.eqns) == (2 + at_once) * of_a_product + of_delta


@pytest.mark.parametrize("size", [64, 128])
def test_backward_is_one_pass_where_order_is_free(size: int) -> None:
    fits = (128, "", None, 1)
    text = lowered(jnp.bfloat16, size, *fits, deterministic=False)
    assert text.count("mosaic_gpu_v2") == 2
    assert "block_sparse_attention_dk_dv_dq" in text


def test_kernels_have_names_in_profiles() -> None:
    text = lowered(jnp.bfloat16, 64, 128, "", None, 1)
    for name in ("forward", "dq", "dk_dv"):
        assert f"block_sparse_attention_{name}" in text


def test_kernels_are_chosen_for_a_hopper_gpu() -> None:
    """Without being asked for; but not for what they can't do."""
    fits = (64, 128, "", None, 1, None)
    assert lowered(jnp.bfloat16, *fits).count("mosaic_gpu_v2") == 3
    assert "mosaic_gpu_v2" not in lowered(jnp.float32, *fits)
    assert "mosaic_gpu_v2" not in lowered(jnp.bfloat16, 257, *fits[1:])
