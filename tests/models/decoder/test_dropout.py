"""Does dropout differ by call and by layer, and is it off in evaluation?"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.model.network import PipelineNetwork, WholeModel
from jaxpar.models import DecoderConfig, make_decoder
from jaxpar.models.decoder.embed_head import Embed, Head
from jaxpar.models.decoder.model import Block

CONFIG = DecoderConfig(
    vocab_size=17, seq_len=6, num_layers=3, num_heads=4, width=16, dropout=0.5
)
TOKENS = jnp.arange(12).reshape(2, 6)
KEY = jax.random.key(1)
PARTS = [Embed, Block, Head]
HALVES = [("attention", "output"), ("mlp", "down")]


@functools.cache
def evaluated() -> WholeModel:
    """The model as it is evaluated."""
    return make_decoder(CONFIG).init(0, TOKENS)


def make_network() -> PipelineNetwork:
    return make_decoder(CONFIG).make_network(
        lambda model, tokens: model(tokens), TOKENS
    )


@functools.cache
def program_of(fn: Callable) -> Callable:
    """``fn(model, TOKENS)`` in a training step, as a function of parameters and key."""
    network = make_network()

    def run(params: dict, key: jax.Array) -> Any:
        return network.run(fn, (params, {}), key, TOKENS, training=True)[0]

    return jax.jit(run)


def logits(model: WholeModel, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def hidden(model: WholeModel, tokens: jax.Array) -> jax.Array:
    return model.run_blocks(tokens)


def two_hidden(model: WholeModel, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return model.run_blocks(tokens), model.run_blocks(tokens)


def params_of(half: tuple[str, str], layers: Any = ...) -> dict:
    """Zeros but for a bias of one, with which the half of a layer adds its mask."""
    params = jax.tree.map(jnp.zeros_like, evaluated().params)
    linear = params["blocks"][half[0]][half[1]]
    linear["bias"] = linear["bias"].at[layers].set(1)
    return params


def mask_of(half: tuple[str, str], layer: int) -> np.ndarray:
    mask = np.asarray(program_of(hidden)(params_of(half, layer), KEY))
    assert set(np.unique(mask)) == {0.0, 2.0}
    return mask


def test_dropout_differs_from_call_to_call():
    def two_logits(model: WholeModel, tokens: jax.Array) -> tuple:
        return model(tokens), model(tokens)

    first, second = program_of(two_logits)(evaluated().params, KEY)
    assert not np.allclose(first, second)


@pytest.mark.parametrize("half", HALVES, ids="/".join)
def test_dropout_of_the_blocks_differs_from_call_to_call(half: tuple[str, str]):
    first, second = program_of(two_hidden)(params_of(half), KEY)
    assert not np.array_equal(first, second)


def test_dropout_is_the_same_for_the_same_keys():
    params = evaluated().params
    program = program_of(logits)
    again = program_of.__wrapped__(logits)
    first = program(params, KEY)
    np.testing.assert_array_equal(first, again(params, KEY))
    assert not np.allclose(first, program(params, jax.random.key(2)))


@pytest.mark.parametrize("half", HALVES, ids="/".join)
def test_dropout_masks_differ_between_layers(half: tuple[str, str]):
    masks = [mask_of(half, layer) for layer in range(CONFIG.num_layers)]
    for one, other in itertools.combinations(masks, 2):
        assert not np.array_equal(one, other)


def test_dropout_masks_differ_between_the_halves_of_a_layer():
    attention, mlp = (mask_of(half, 0) for half in HALVES)
    assert not np.array_equal(attention, mlp)


def test_dropout_is_off_under_eval():
    model = evaluated()
    plain = make_decoder(dataclasses.replace(CONFIG, dropout=0.0)).init(1, TOKENS)
    plain = plain.with_params(model.params)
    right = plain(TOKENS)
    np.testing.assert_array_equal(model(TOKENS), right)
    assert not np.allclose(program_of(logits)(model.params, KEY), right)


def test_model_under_eval_may_be_closed_over_by_jit():
    model = evaluated()
    jitted = jax.jit(lambda tokens: model(tokens))
    np.testing.assert_allclose(jitted(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", PARTS)
def test_part_without_dropout_has_no_state_but_parameters(part: Callable):
    module = part(dataclasses.replace(CONFIG, dropout=0.0), rngs=nnx.Rngs(0))
    _, params, rest = nnx.split(module, nnx.Param, ...)
    assert jax.tree.leaves(params)
    assert not jax.tree.leaves(rest)


@pytest.mark.parametrize("part", PARTS)
def test_part_with_dropout_has_no_state_but_parameters_and_keys(part: Callable):
    module = part(CONFIG, rngs=nnx.Rngs(0))
    *_, keys, _, rest = nnx.split(module, nnx.Param, nnx.RngKey, nnx.RngCount, ...)
    assert bool(jax.tree.leaves(keys)) == (part is not Head)
    assert not jax.tree.leaves(rest)
