"""Does attention by blocks of queries give what attention at once gives?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.models.blocked_attention import (
    BLOCK,
    MAX_BLOCKS,
    Scoring,
    _blocks,
    blocked_attention,
)


def inputs(length: int, heads: int, kv_heads: int, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [
        jax.random.normal(key, (2, length, size, 8), dtype)
        for key, size in zip(keys, sizes, strict=True)
    ]


def at_once(query, key, value, mask=None):
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)


# One program each, where every operation would be one: compiling is what takes time.
@functools.partial(jax.jit, static_argnums=0)
def result_and_gradients(fn, query, key, value, cotangent):
    out, pull = jax.vjp(fn, query, key, value)
    return [out, *pull(cotangent)]


def largest_difference(length, heads, kv_heads, mask=None) -> float:
    arrays = inputs(length, heads, kv_heads)
    ours, theirs = (
        result_and_gradients(lambda *x, fn=fn: fn(*x, mask), *arrays)
        for fn in (blocked_attention, at_once)
    )
    return max(float(jnp.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_values_and_gradients_are_those_of_attention_at_once(length, heads, kv_heads):
    assert largest_difference(length, heads, kv_heads) < 2e-5


def scored_at_once(query, key, value, scoring: Scoring):
    """The definition, with all scores."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    scores = scores * (scoring.scale or query.shape[-1] ** -0.5)
    if scoring.softcap:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    back = jnp.arange(query.shape[1])[:, None] - jnp.arange(query.shape[1])
    seen = (back >= 0) & (back < (scoring.window or query.shape[1]))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(window=1),
        Scoring(window=BLOCK + 7),
        Scoring(scale=0.7, softcap=2.0),
        Scoring(window=20, softcap=1.5),
    ],
)
def test_windows_scales_and_caps_are_as_defined(scoring):
    arrays = inputs(2 * BLOCK + 5, 4, 2)
    ours, theirs = (
        result_and_gradients(fn, *arrays)
        for fn in (
            lambda *x: blocked_attention(*x, None, scoring),
            lambda *x: scored_at_once(*x, scoring),
        )
    )
    for a, b in zip(ours, theirs, strict=True):
        assert float(jnp.abs(a - b).max()) < 2e-5


@pytest.mark.parametrize(("length", "keys"), [(BLOCK + 5, BLOCK + 5), (70, 31)])
def test_every_key_is_seen_and_scores_have_a_bias(length: int, keys: int):
    """Without the causal mask, of other keys than queries, and with padded keys."""
    query, key, value, cotangent = inputs(max(length, keys), 4, 2)
    query, cotangent = query[:, :length], cotangent[:, :length]
    key, value = key[:, :keys], value[:, :keys]
    bias = jax.random.normal(jax.random.key(7), (4, length, keys))
    mask = jnp.arange(keys) < jnp.array([keys, keys - 9])[:, None]
    mask = mask[:, None, None]
    scoring = Scoring(scale=1.0, causal=False)

    def ours(query, key, value, bias):
        whole = jnp.broadcast_to(mask, (2, 1, length, keys))
        return blocked_attention(query, key, value, whole, scoring, bias)

    def theirs(query, key, value, bias):
        return jax.nn.dot_product_attention(
            query, key, value, bias=bias[None], mask=mask, scale=1.0
        )

    found = []
    for fn in (ours, theirs):
        out, pull = jax.vjp(jax.jit(fn), query, key, value, bias)
        found.append([out, *pull(cotangent)])
    for a, b in zip(*found, strict=True):
        assert float(jnp.abs(a - b).max()) < 2e-4


def test_a_block_reads_no_key_before_its_window():
    length, window = 8 * BLOCK, BLOCK // 2
    widths = [
        b.keys.stop - b.keys.start
        for b in _blocks(length, length, Scoring(window=window))
    ]
    assert max(widths) == BLOCK + window - 1


def test_segments_do_not_see_each_other():
    length = BLOCK + 16
    segments = jnp.arange(length)[None] >= BLOCK - 10
    mask = (segments[:, None, :, None] == segments[:, None, None, :]).repeat(2, 0)
    assert largest_difference(length, 2, 2, mask) < 2e-5
    assert largest_difference(length, 2, 2) < 2e-5
    arrays = inputs(length, 2, 2)[:3]
    attend = jax.jit(blocked_attention)
    apart = attend(*arrays, mask) - attend(*arrays)
    assert float(jnp.abs(apart[:, BLOCK:]).max()) > 1e-2


def test_no_query_sees_a_later_key():
    query, key, value, _ = inputs(2 * BLOCK, 2, 2)
    row = BLOCK + 3
    changed = value.at[:, row + 1 :].add(1e6)
    attend = jax.jit(blocked_attention)
    before, after = (attend(query, key, v) for v in (value, changed))
    np.testing.assert_array_equal(before[:, : row + 1], after[:, : row + 1])
    assert float(jnp.abs(after - before)[:, row + 1 :].min()) > 1


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_half_precision_sums_in_fp32(dtype, error):
    arrays = inputs(BLOCK + 9, 2, 2, jnp.dtype(dtype))
    wide = [x.astype(jnp.float32) for x in arrays]
    ours = result_and_gradients(blocked_attention, *arrays)
    theirs = result_and_gradients(at_once, *wide)
    assert {x.dtype for x in ours} == {jnp.dtype(dtype)}
    for a, b in zip(ours, theirs, strict=True):
        assert float(jnp.abs(a.astype(jnp.float32) - b).max()) < error * 4


def test_blocks_cover_every_row_once_and_are_not_too_many():
    for length in (1, BLOCK, 3 * BLOCK + 1, 100 * BLOCK):
        blocks = list(_blocks(length, length))
        rows = [row for b in blocks for row in range(b.rows.start, b.rows.stop)]
        assert rows == list(range(length))
        assert len(blocks) <= MAX_BLOCKS


def test_the_backward_pass_keeps_no_scores():
    length = 4 * BLOCK
    arrays = inputs(length, 2, 2)[:3]
    _, pull = jax.vjp(jax.jit(blocked_attention), *arrays)
    scores = 2 * 2 * length * length
    assert max(x.size for x in jax.tree.leaves(pull)) < scores / 4
