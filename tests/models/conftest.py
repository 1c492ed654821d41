"""Models whose every parameter is drawn at random, norms and biases included."""

from collections.abc import Callable

import jax
import pytest
from flax import nnx

from jaxpar.models.gpt.config import GPTConfig
from jaxpar.models.gpt.model import GPT


def _randomise(model: nnx.Module, seed: int = 0, scale: float = 0.2) -> None:
    params = nnx.state(model, nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        leaf + scale * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    nnx.update(model, jax.tree.unflatten(treedef, drawn))


@pytest.fixture
def make_random_gpt() -> Callable[..., GPT]:
    """`make_random_gpt(config)`: a GPT with no parameter at a round number."""

    def make(config: GPTConfig) -> GPT:
        model = GPT(config, rngs=nnx.Rngs(0))
        _randomise(model)
        return model

    return make
