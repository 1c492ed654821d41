"""Do the embedding, the part between and the head pass on what blocks need?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models import T5Config
from jaxpar.models.t5.ends import T5Between, T5Embed, T5Head

CONFIG = T5Config(vocab_size=11, num_heads=2, width=8, num_buckets=4, max_distance=5)
TIED = dataclasses.replace(CONFIG, tied_embedding=True)
READ, WRITTEN = jnp.array([[1, 2, 3], [4, 5, 10]]), jnp.array([[0, 7], [0, 8]])


def test_each_row_has_the_tables_in_fp32() -> None:
    embed: Any = T5Embed(CONFIG, rngs=nnx.Rngs(0))
    hidden = embed(READ, WRITTEN)
    table = embed.embedding.table[...]
    np.testing.assert_array_equal(hidden["x"], table[READ])
    np.testing.assert_array_equal(hidden["target"], table[WRITTEN])
    for name in ("encoder_bias", "decoder_bias"):
        own = getattr(embed, name)
        assert own.get_metadata("out_sharding") == (None, "heads")
        np.testing.assert_array_equal(hidden[name], np.stack([own[...]] * 2))
    nnx.update(embed, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(embed)))
    half = embed(READ, WRITTEN)
    assert half["x"].dtype == jnp.bfloat16
    assert half["encoder_bias"].dtype == jnp.float32


def test_between_the_stacks_the_decoder_begins_with_its_tokens() -> None:
    hidden = T5Embed(CONFIG, rngs=nnx.Rngs(0))(READ, WRITTEN)
    after = T5Between(CONFIG, rngs=nnx.Rngs(0))(hidden)
    assert after.keys() == {"x", "memory", "decoder_bias"}
    assert after["x"] is hidden["target"]
    squares = jnp.square(after["memory"]).mean(-1)
    np.testing.assert_allclose(squares, 1, rtol=1e-4)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_the_head_gives_logits_or_their_cross_entropy(config: T5Config) -> None:
    head: Any = T5Head(config, rngs=nnx.Rngs(0))
    hidden = {"x": jax.random.normal(jax.random.key(0), (2, 3, 8))}
    normal = hidden["x"] / jnp.sqrt(jnp.square(hidden["x"]).mean(-1, keepdims=True))
    logits = head(hidden)
    right = (
        normal @ head.logits.table[...].T / 8**0.5
        if config.tied_embedding
        else normal @ head.logits.kernel[...]
    )
    np.testing.assert_allclose(logits, right, atol=1e-4)
    targets, weights = READ, jnp.array([[1.0, 0.0, 0.5]] * 2)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(right), targets[..., None], -1)
    total = head(hidden, targets_BT=targets, weights_BT=weights)
    assert float(total) == pytest.approx(float((losses[..., 0] * weights).sum()))


def test_dropout_is_behind_the_embedding_and_the_last_norms() -> None:
    config = dataclasses.replace(CONFIG, dropout=0.5)
    embed = T5Embed(config, rngs=nnx.Rngs(0))
    hidden = embed(READ, WRITTEN)
    assert (hidden["x"] == 0).any()
    assert (hidden["target"] == 0).any()
    between = T5Between(config, rngs=nnx.Rngs(1))
    assert (between(hidden)["memory"] == 0).mean() > (hidden["x"] == 0).mean()
