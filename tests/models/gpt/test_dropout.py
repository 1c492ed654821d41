"""Does dropout differ by call and by layer, and is it off in evaluation?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.gpt.config import GPTConfig
from jaxpar.models.gpt.model import GPT

CONFIG = GPTConfig(
    vocab_size=17, seq_len=6, num_layers=3, num_heads=4, width=16, dropout=0.5
)
TOKENS = jnp.arange(12).reshape(2, 6)


@pytest.mark.parametrize(
    "scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_dropout_differs_from_call_to_call(scan_layers: bool):
    model = GPT(dataclasses.replace(CONFIG, scan_layers=scan_layers), rngs=nnx.Rngs(0))
    first, second = model(TOKENS), model(TOKENS)
    assert not np.allclose(first, second)


def test_dropout_of_the_blocks_differs_from_call_to_call():
    model: Any = GPT(CONFIG, rngs=nnx.Rngs(0))
    counts = model.blocks.dropout.rngs.count[...]
    model(TOKENS)
    # Two draws a layer: behind attention and behind the MLP.
    np.testing.assert_array_equal(model.blocks.dropout.rngs.count[...], counts + 2)


def test_dropout_is_the_same_for_the_same_keys():
    first = GPT(CONFIG, rngs=nnx.Rngs(0))(TOKENS)
    np.testing.assert_array_equal(first, GPT(CONFIG, rngs=nnx.Rngs(0))(TOKENS))
    other = GPT(CONFIG, rngs=nnx.Rngs(params=0, dropout=1))
    nnx.update(other, nnx.state(GPT(CONFIG, rngs=nnx.Rngs(0)), nnx.Param))
    assert not np.allclose(first, other(TOKENS))


def test_dropout_has_a_key_per_layer():
    model: Any = GPT(CONFIG, rngs=nnx.Rngs(0))
    keys = jax.random.key_data(model.blocks.dropout.rngs.key[...])
    assert len(np.unique(keys, axis=0)) == CONFIG.num_layers


def test_dropout_masks_differ_between_layers():
    # With every kernel at zero and a value of one as bias, a layer adds its mask.
    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    params = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    nnx.update(model, params)
    graphdef, state = nnx.split(model.blocks)
    masks = []
    for layer in range(CONFIG.num_layers):
        block: Any = nnx.merge(graphdef, jax.tree.map(lambda x, i=layer: x[i], state))
        block.mlp.down.bias[...] = jnp.ones_like(block.mlp.down.bias[...])
        masks.append(np.asarray(block(jnp.zeros((2, 6, 16)))))
    assert all(set(np.unique(mask)) == {0.0, 2.0} for mask in masks)
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[1], masks[2])


def test_dropout_is_off_under_eval():
    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    model.eval()
    plain = GPT(dataclasses.replace(CONFIG, dropout=0.0), rngs=nnx.Rngs(0))
    nnx.update(plain, nnx.state(model, nnx.Param))
    np.testing.assert_array_equal(model(TOKENS), plain(TOKENS))
    model.train()
    assert not np.allclose(model(TOKENS), plain(TOKENS))


def test_model_under_eval_may_be_closed_over_by_jit():
    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    model.eval()
    logits = jax.jit(lambda tokens: model(tokens))(TOKENS)
    np.testing.assert_allclose(logits, model(TOKENS), rtol=1e-5, atol=1e-6)


def test_model_without_dropout_has_no_state_but_parameters():
    model = GPT(dataclasses.replace(CONFIG, dropout=0.0), rngs=nnx.Rngs(0))
    _, _, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)


def test_model_with_dropout_has_no_state_but_parameters_and_keys():
    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    *_, rest = nnx.split(model, nnx.Param, nnx.RngKey, nnx.RngCount, ...)
    assert not jax.tree.leaves(rest)
