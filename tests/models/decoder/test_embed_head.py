"""What comes before and after a GPT's blocks: is it what NumPy computes?"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.decoder import embed_head
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.norms import LayerNorm, RMSNorm

SMALL = {"vocab_size": 11, "seq_len": 6, "num_layers": 1, "num_heads": 2, "width": 8}
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 5))
HIDDEN = np.random.default_rng(1).normal(size=(2, 5, 8)) * 3 + 1


def make_embed(**fields: Any) -> embed_head.Embed:
    config = DecoderConfig(**SMALL, **fields)
    return embed_head.Embed(config, rngs=nnx.Rngs(0, dropout=1))


def make_head(**fields: Any) -> embed_head.Head:
    """A head whose norm is not at ones and zeros."""
    head: Any = embed_head.Head(DecoderConfig(**SMALL, **fields), rngs=nnx.Rngs(0))
    head.final_norm.scale[...] = jnp.linspace(0.5, 2, 8)
    head.final_norm.bias[...] = jnp.linspace(-1, 1, 8)
    return head


def tables_of(embed: embed_head.Embed) -> tuple[np.ndarray, np.ndarray]:
    tables = embed.embedding.table[...], embed.positions.table[...]
    return np.asarray(tables[0]), np.asarray(tables[1])


def test_positions_count_from_zero_where_none_are_given():
    embed = make_embed()
    tokens, positions = tables_of(embed)
    got = embed(jnp.asarray(TOKENS))
    np.testing.assert_array_equal(got, tokens[TOKENS] + positions[:5])
    counted = embed(jnp.asarray(TOKENS), positions_BT=jnp.arange(5)[None])
    np.testing.assert_array_equal(got, counted)


def test_positions_that_are_given_are_looked_up():
    embed = make_embed()
    tokens, positions = tables_of(embed)
    where = np.array([[0, 1, 0, 1, 2], [5, 4, 3, 2, 1]])
    got = embed(jnp.asarray(TOKENS), positions_BT=jnp.asarray(where))
    np.testing.assert_array_equal(got, tokens[TOKENS] + positions[where])


def test_rotary_positions_add_nothing_and_have_no_table():
    embed = make_embed(positions="rotary")
    assert embed.positions is None
    got = embed(jnp.zeros((1, 9), int))
    table = np.asarray(embed.embedding.table[...])
    np.testing.assert_array_equal(got, np.tile(table[0], (1, 9, 1)))


def test_row_longer_than_the_learned_positions_raises():
    message = r"a row of 7 tokens is longer than the 6 learned positions"
    with pytest.raises(ValueError, match=message):
        make_embed()(jnp.zeros((1, 7), int))


def test_row_as_long_as_the_learned_positions_is_embedded():
    assert make_embed()(jnp.zeros((1, 6), int)).shape == (1, 6, 8)


def test_embedding_is_dropped_with_the_rest_scaled():
    embed = make_embed(dropout=0.5)
    tokens, positions = tables_of(embed)
    right = tokens[TOKENS] + positions[:5]
    got = np.asarray(embed(jnp.asarray(TOKENS)))
    is_kept = got != 0
    assert 0 < is_kept.mean() < 1
    np.testing.assert_allclose(got, np.where(is_kept, 2 * right, 0), rtol=1e-6)


def test_dropout_of_rate_zero_is_none():
    assert make_embed().dropout is None


@pytest.mark.parametrize("bias", [False, True])
def test_norm_is_the_one_that_the_config_names(bias: bool):
    norm = embed_head.make_norm(DecoderConfig(**SMALL, bias=bias))
    assert isinstance(norm, LayerNorm)
    assert (norm.bias is not None) == bias
    rms = embed_head.make_norm(DecoderConfig(**SMALL, bias=bias, norm="rmsnorm"))
    assert isinstance(rms, RMSNorm)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_are_the_product_of_the_normalised_stream(
    sequence_parallel: bool, tied: bool
):
    head: Any = make_head(tied_embedding=tied, sequence_parallel=sequence_parallel)
    kernel = head.logits.table[...].T if tied else head.logits.kernel[...]
    x = HIDDEN - HIDDEN.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    x = x * np.linspace(0.5, 2, 8) + np.linspace(-1, 1, 8)
    got = head(jnp.asarray(HIDDEN, jnp.float32))
    np.testing.assert_allclose(got, x @ np.asarray(kernel), rtol=1e-5, atol=1e-5)


def test_tied_head_is_the_head_of_the_transposed_table():
    tied: Any = make_head(tied_embedding=True)
    untied: Any = make_head(tied_embedding=False)
    assert untied.logits.kernel[...].shape == (8, 11)
    assert untied.logits.bias is None
    untied.logits.kernel[...] = tied.logits.table[...].T
    hidden = jnp.asarray(HIDDEN, jnp.float32)
    np.testing.assert_array_equal(tied(hidden), untied(hidden))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_of_half_precision_are_the_product_in_fp32(sequence_parallel: bool):
    head: Any = make_head(tied_embedding=False, sequence_parallel=sequence_parallel)
    kernel = np.random.default_rng(2).normal(size=(8, 11))
    head.logits.kernel.set_value(jnp.asarray(kernel, jnp.bfloat16))
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)
    got = head(hidden)
    assert got.dtype == jnp.float32
    halves = head.final_norm(hidden), head.logits.kernel[...]
    assert [half.dtype for half in halves] == [jnp.bfloat16] * 2
    right = np.matmul(*(np.asarray(x, np.float64) for x in halves))
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)
