"""Do the blocks keep what is not theirs, and see what they should?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models import T5Config
from jaxpar.models.t5.blocks import T5DecoderBlock, T5EncoderBlock, make_norm

CONFIG = T5Config(num_heads=2, width=8, mlp_width=12, num_buckets=4, max_distance=5)
rng = np.random.default_rng(0)


def hidden_of(**given: Any) -> dict[str, jax.Array]:
    tables = {"encoder_bias": (2, 4, 2), "decoder_bias": (2, 4, 2)}
    drawn = {name: rng.normal(size=shape) for name, shape in (given | tables).items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}


def test_an_encoder_block_changes_its_residual_stream_alone() -> None:
    hidden = hidden_of(x=(2, 5, 8), target=(2, 3, 8))
    block: Any = T5EncoderBlock(CONFIG, rngs=nnx.Rngs(0))
    after = block(hidden)
    assert after.keys() == hidden.keys()
    changed = [name for name in hidden if not np.array_equal(hidden[name], after[name])]
    assert changed == ["x"]
    last = hidden | {"x": hidden["x"].at[:, -1].add(1.0)}
    assert (block(last)["x"] - after["x"])[:, 0].any(), "the first token sees the last"


def test_a_decoder_block_sees_tokens_before_and_the_whole_memory() -> None:
    hidden = hidden_of(x=(2, 4, 8), memory=(2, 5, 8))
    block: Any = T5DecoderBlock(CONFIG, rngs=nnx.Rngs(0))
    x = block(hidden)["x"]
    later = block(hidden | {"x": hidden["x"].at[:, -1].add(1.0)})["x"]
    np.testing.assert_array_equal(later[:, :-1], x[:, :-1])
    memory = hidden["memory"].at[:, -1].add(1.0)
    other = block(hidden | {"memory": memory})["x"]
    assert (other != x).any(-1).all()
    mask = jnp.array([[1, 1, 1, 1, 0]] * 2)
    masked = block(hidden, segment_ids_BS=mask)["x"]
    again = block(hidden | {"memory": memory}, segment_ids_BS=mask)["x"]
    np.testing.assert_array_equal(masked, again)


def test_scores_are_not_scaled_and_kernels_begin_as_small_as_that_needs() -> None:
    config = dataclasses.replace(CONFIG, width=64, head_width=16, mlp_width=256)
    block: Any = T5DecoderBlock(config, rngs=nnx.Rngs(0))
    for part in (block.attention, block.cross_attention):
        assert part.scoring.scale == 1.0
        kernels = (part.query, part.key, part.value, part.output)
        found = [float(each.kernel[...].std()) for each in kernels]
        right = [1 / 32, 1 / 8, 1 / 8, 32**-0.5]
        assert found == pytest.approx(right, rel=0.1)
    assert block.attention.scoring.causal
    assert not block.cross_attention.scoring.causal
    found = [float(x.kernel[...].std()) for x in (block.mlp.up, block.mlp.down)]
    assert found == pytest.approx([1 / 8, 1 / 16], rel=0.1)
    assert make_norm(config).epsilon == 1e-6
