"""Models whose every parameter is drawn at random, norms and biases included."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxpar.model.network import WholeModel
from jaxpar.models import DecoderConfig, make_decoder
from jaxpar.types import Params


def _randomised(params: Params, seed: int = 0, scale: float = 0.2) -> Params:
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        leaf + scale * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, drawn)


@functools.cache  # What is traced for a model is kept for that very object.
def _random_gpt(config: DecoderConfig) -> WholeModel:
    model = make_decoder(config).init(0, jnp.zeros((1, 2), int))
    return model.with_params(_randomised(model.params))


@pytest.fixture
def make_random_gpt() -> Callable[[DecoderConfig], WholeModel]:
    """`make_random_gpt(config)`: a GPT with no parameter at a round number."""
    return _random_gpt
