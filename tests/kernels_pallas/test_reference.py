"""Is block-sparse attention what dense attention under its mask is, with less work?"""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.sparse_attention import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    SparsityPattern,
    Variable,
    make_layout,
)
from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    Tile,
    TileWork,
    api,
    block_sparse_attention,
    make_tile_work,
)
from tests.kernels_pallas.oracle import dense_attention, visible_mask

BATCH, HEADS, SIZE, BLOCK = 2, 4, 8, 8
TILE = Tile(16, 32)
# fp32, sums of up to a hundred terms in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def patterns(attention: str) -> dict[str, SparsityPattern]:
    given = {"num_heads": HEADS, "block": BLOCK, "attention": attention}
    per_head = {"different_layout_per_head": True}
    return {
        "dense": Dense(**given),
        "fixed": Fixed(**given, **per_head, num_different_global_patterns=4),
        "variable": Variable(**given, local_window_blocks=(1, 3), num_random_blocks=1),
        "bigbird": BigBird(**given, **per_head),
        "longformer": BSLongformer(**given, global_block_indices=(2,)),
        "sliding": LocalSlidingWindow(**given),
    }


CAUSAL = {True: patterns("unidirectional"), False: patterns("bidirectional")}


def tile_work_of(
    layout: BlockLayout, seq_len: int, *, causal: bool, tile: Tile
) -> TileWork:
    with warnings.catch_warnings(action="ignore"):  # of coarse tiles
        return make_tile_work(layout, seq_len, seq_len, causal=causal, tile=tile)


def operands(seq_len: int, kv_heads: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [(BATCH, seq_len, heads, SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    return tuple(
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes
    )


def limits_of(kind: str, seq_len: int) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments, and the mask [B, 1, T, S] that they mean."""
    options, mask = {}, np.ones((BATCH, 1, seq_len, seq_len), bool)
    if "segments" in kind:
        rng = np.random.default_rng(1)
        ids = np.sort(rng.integers(0, 3, (BATCH, seq_len)), axis=1)
        options["segment_ids"] = jnp.asarray(ids)
        mask = mask & (ids[:, None, :, None] == ids[:, None, None])
    if "lengths" in kind:
        lens = np.array([seq_len - 11, 3])
        options["kv_seq_lens"] = jnp.asarray(lens)
        mask = mask & (np.arange(seq_len) < lens[:, None, None, None])
    return options, mask


CASES = list(
    itertools.product(
        CAUSAL[True], (True, False), (4, 2), ("plain", "segments+lengths")
    )
)


@pytest.mark.parametrize(("name", "causal", "kv_heads", "limits"), CASES)
def test_result_and_gradients_are_dense_attentions(
    name: str, causal: bool, kv_heads: int, limits: str
) -> None:
    """At a length that is no multiple of the block, nor of the tile."""
    seq_len = 93
    layout = make_layout(CAUSAL[causal][name], 96)
    work = tile_work_of(layout, seq_len, causal=causal, tile=TILE)
    options, mask = limits_of(limits, seq_len)
    mask = mask & visible_mask(layout, seq_len, seq_len, causal=causal)
    scale = SIZE**-0.5

    def sparse(q, k, v):
        return block_sparse_attention(q, k, v, work, return_lse=True, **options)

    def dense(q, k, v):
        return dense_attention(q, k, v, jnp.asarray(mask), scale)

    assert_same(sparse, dense, operands(seq_len, kv_heads))


def assert_same(sparse, dense, given: tuple[jax.Array, ...]) -> None:
    def compare(given, cotangents):
        (o, lse), pull = jax.vjp(sparse, *given)
        finite = jnp.isfinite(lse)
        cotangents = (cotangents[0], jnp.where(finite, cotangents[1], 0.0))
        (want_o, want_lse), want_pull = jax.vjp(dense, *given)
        return (o, lse, *pull(cotangents)), (want_o, want_lse, *want_pull(cotangents))

    rng = np.random.default_rng(2)
    o, lse = jax.eval_shape(sparse, *given)
    cotangents = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (o, lse)]
    found, wanted = jax.jit(compare)(given, cotangents)
    for name, one, other in zip(
        ("o", "lse", "dq", "dk", "dv"), found, wanted, strict=True
    ):
        np.testing.assert_allclose(one, other, **TOLERANCE, err_msg=name)


def test_queries_that_see_nothing_give_0_and_take_a_gradient_of_0() -> None:
    blocks = np.zeros((4, 4), bool)
    blocks[1] = True
    work = tile_work_of(BlockLayout(blocks, 16), 64, causal=False, tile=Tile(16, 16))
    given = operands(64, 4)
    attend = jax.jit(lambda *x: block_sparse_attention(*x, work))
    o, pull = jax.vjp(attend, *given)
    seen = np.repeat(blocks.any(1), 16)
    assert (np.asarray(o)[:, ~seen] == 0).all()
    assert (np.asarray(o)[:, seen] != 0).all()
    dq, dk, dv = pull(jnp.ones_like(o))
    assert (np.asarray(dq)[:, ~seen] == 0).all()
    for gradient in (dq, dk, dv):
        assert np.isfinite(gradient).all()


def test_layout_without_any_block_gives_0() -> None:
    layout = BlockLayout(np.zeros((2, 2), bool), 16)
    work = tile_work_of(layout, 32, causal=False, tile=Tile(16, 16))
    attend = jax.jit(lambda *x: block_sparse_attention(*x, work))
    o, pull = jax.vjp(attend, *operands(32, 4))
    assert not np.asarray(o).any()
    assert not any(np.asarray(x).any() for x in pull(jnp.ones_like(o)))


def test_queries_and_keys_may_have_lengths_and_segments_of_their_own() -> None:
    rng = np.random.default_rng(3)
    blocks = rng.random((HEADS, 3, 5)) < 0.5
    layout = BlockLayout(blocks, 16)
    work = make_tile_work(layout, 47, 70, causal=False, tile=Tile(16, 16))
    q, *_ = operands(47, 4)
    _, k, v = operands(70, 2)
    ids = [np.sort(rng.integers(0, 2, (BATCH, n)), axis=1) for n in (47, 70)]
    mask = visible_mask(layout, 47, 70, causal=False)
    mask = mask & (ids[0][:, None, :, None] == ids[1][:, None, None])
    pair = tuple(map(jnp.asarray, ids))
    assert_same(
        lambda *x: block_sparse_attention(
            *x, work, scale=0.3, segment_ids=pair, return_lse=True
        ),
        lambda *x: dense_attention(*x, jnp.asarray(mask), 0.3),
        (q, k, v),
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_sums_in_fp32(dtype: Any) -> None:
    """2 percent: what rounding q, k, v and the weights to 8 bits each allows."""
    layout = make_layout(CAUSAL[True]["dense"], 256)
    work = tile_work_of(layout, 256, causal=True, tile=Tile(32, 32))
    given = operands(256, 2)
    half = tuple(x.astype(dtype) for x in given)
    mask = jnp.asarray(visible_mask(layout, 256, 256, causal=True))[None]
    ours = jax.jit(lambda *x: block_sparse_attention(*x, work))
    right = jax.jit(lambda *x: dense_attention(*x, mask, SIZE**-0.5)[0])
    o, pull = jax.vjp(ours, *half)
    want, want_pull = jax.vjp(right, *given)
    assert o.dtype == dtype
    gradients = pull(jnp.ones_like(o))
    wanted = want_pull(jnp.ones_like(want))
    for one, other in zip((o, *gradients), (want, *wanted), strict=True):
        assert one.dtype == dtype
        error = jnp.linalg.norm(one.astype(jnp.float32) - other)
        assert error < 0.02 * jnp.linalg.norm(other)


def test_lengths_beyond_the_keys_show_no_padding() -> None:
    work = tile_work_of(
        BlockLayout(np.ones((4, 4), bool), 16), 50, causal=False, tile=TILE
    )
    q, k, v = operands(50, 4)
    attend = jax.jit(
        lambda lens: block_sparse_attention(q, k, v, work, kv_seq_lens=lens)
    )
    right = attend(jnp.array([50, 50]))
    np.testing.assert_array_equal(attend(jnp.array([64, 51])), right)
    # The kernels, which are handed whole tiles, rely on it.
    assert list(api._limits(q, k, None, jnp.array([64, 20])).kv_seq_lens) == [50, 20]


def temporaries(work: TileWork, heads: int) -> int:
    shape = (1, work.seq_q, heads, 32)
    q = jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(q, k, v):
        return block_sparse_attention(q, k, v, work).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return step.lower(q, q, q).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_sequence_and_work_with_the_active_blocks() -> None:
    """Four times the length takes four times the memory; T x T would take sixteen."""
    found = {}
    for seq_len in (2048, 8192):
        layout = make_layout(LocalSlidingWindow(1, block=64), seq_len)
        work = make_tile_work(layout, seq_len, seq_len, causal=True, tile=Tile(64, 64))
        found[seq_len] = temporaries(work, heads=1)
    assert found[8192] < 4.2 * found[2048]
    assert found[8192] < 0.3 * 4 * 8192**2
    dense = make_layout(Dense(1, block=64, attention="unidirectional"), 8192)
    work = make_tile_work(dense, 8192, 8192, causal=True, tile=Tile(64, 64))
    assert temporaries(work, heads=1) < 0.3 * 4 * 8192**2


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 64, 32)}, r"q: has shape \(2, 64, 32\); it must be"),
        ({"v": (2, 64, 4, 16)}, "k and v: have shapes"),
        ({"q": (1, 64, 4, 8)}, "q and k: .* batch and head size"),
        ({"k": (2, 64, 3, 8), "v": (2, 64, 3, 8)}, "4 heads of queries .* 3 heads"),
        ({"q": (2, 64, 8, 8)}, "work: of a layout of 4 heads, but q has 8"),
        ({"q": (2, 48, 4, 8)}, "work: made for 64 queries .* have 48 and 64"),
        ({"segment_ids": (2, 63)}, r"segment_ids: has shape \(2, 63\) for queries"),
        ({"kv_seq_lens": (3,)}, r"kv_seq_lens: has shape \(3,\); .* 2 sequences"),
    ],
)
def test_operands_that_do_not_belong_together_are_refused(
    change: dict[str, tuple[int, ...]], message: str
) -> None:
    layout = BlockLayout(np.ones((4, 4, 4), bool) & np.tri(4, dtype=bool), 16)
    layout.blocks[1, 1, 0] = False  # heads that differ
    work = make_tile_work(layout, 64, 64, causal=True, tile=Tile(16, 16))
    shapes = {name: (2, 64, 4, 8) for name in "qkv"} | change
    ids = {name: jnp.zeros(shapes.pop(name), jnp.int32) for name in list(shapes)[3:]}
    q, k, v = (jnp.zeros(shapes[name]) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, k, v, work, **ids)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "xla"}, "implementation='xla': must be 'mosaic' or 'refer"),
        ({"segment_ids": (jnp.zeros((2, 32), jnp.int32), None)}, "one array, a pair"),
        ({"segment_ids": [jnp.zeros((2, 32), jnp.int32)]}, "segment_ids: .* a pair"),
        ({"scale": -1.0}, "scale=-1.0: must be above 0"),
        (
            {"k": jnp.zeros((2, 32, 4, 8), jnp.bfloat16)},
            "float32, bfloat16 and float32",
        ),
    ],
)
def test_options_that_there_are_not_are_refused(options: dict, message: str) -> None:
    work = tile_work_of(
        BlockLayout(np.ones((2, 2), bool), 16), 32, causal=True, tile=TILE
    )
    given = {"q": jnp.zeros((2, 32, 4, 8))}
    given |= {"k": given["q"], "v": given["q"], "work": work, **options}
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(**given)
