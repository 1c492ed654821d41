"""What comes before a BERT's blocks: is it what NumPy computes?"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.bert.config import BertConfig
from jaxpar.models.bert.embed import BertEmbed

SMALL = {"vocab_size": 11, "seq_len": 6, "num_layers": 1, "num_heads": 2, "width": 8}
RNG = np.random.default_rng(0)
TOKENS, TYPES = RNG.integers(0, 11, (2, 5)), RNG.integers(0, 2, (2, 5))
WHERE = np.array([[0, 1, 0, 1, 2], [5, 4, 3, 2, 1]])


def make_embed(**fields: Any) -> Any:
    """An embedding whose norm is not at ones and zeros."""
    embed: Any = BertEmbed(BertConfig(**SMALL, **fields), rngs=nnx.Rngs(0, dropout=1))
    embed.norm.scale[...] = jnp.linspace(0.5, 2, 8)
    embed.norm.bias[...] = jnp.linspace(-1, 1, 8)
    return embed


def expected(embed: Any, types: Any, positions: Any) -> np.ndarray:
    tables = (embed.embedding, embed.types, embed.positions)
    words, kinds, places = (np.asarray(x.table[...], np.float64) for x in tables)
    x = words[TOKENS] + kinds[types] + places[positions]
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
    return x * np.linspace(0.5, 2, 8) + np.linspace(-1, 1, 8)


@pytest.mark.parametrize("types", [None, TYPES])
@pytest.mark.parametrize("positions", [None, WHERE])
def test_sum_of_three_tables_is_normalised(types: Any, positions: Any):
    embed = make_embed()
    given = {"token_types_BT": types, "positions_BT": positions}
    given = {k: jnp.asarray(v) for k, v in given.items() if v is not None}
    right = expected(
        embed,
        0 if types is None else types,
        np.arange(5) if positions is None else positions,
    )
    got = embed(jnp.asarray(TOKENS), **given)
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_row_longer_than_the_learned_positions_is_refused():
    with pytest.raises(ValueError, match=r"7 tokens is longer than the 6 learned"):
        make_embed()(jnp.zeros((1, 7), int))


def test_dropout_is_behind_the_norm():
    embed = make_embed(dropout=0.5)
    right = expected(embed, 0, np.arange(5))
    got = np.asarray(embed(jnp.asarray(TOKENS)))
    is_kept = got != 0
    assert 0 < is_kept.mean() < 1
    np.testing.assert_allclose(got, np.where(is_kept, 2 * right, 0), rtol=1e-4)
