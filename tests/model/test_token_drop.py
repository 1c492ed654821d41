"""Which tokens do blocks see, at which step, and which models are refused?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.model.blocks import PipelineModel
from jaxpar.model.network import WholeModel
from jaxpar.model.token_drop import RandomLTD

TOKENS = 8
KEY = jax.random.key(1)
DROP = RandomLTD(start=2, steps=4, multiple=2, positions=None)


class AddOne(nnx.Module):
    """Counts the blocks that a token has passed."""

    def __init__(self, rngs: nnx.Rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.one


class AddPosition(AddOne):
    """Adds a token's position and segment."""

    def __call__(
        self,
        x: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        places = jnp.arange(x.shape[1])[None] if positions_BT is None else positions_BT
        found = places if segment_ids_BT is None else places + 100 * segment_ids_BT
        return x + self.one * found[..., None]


class Same(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale


def model_of(drop: RandomLTD, block: Any = AddOne, count: int = 5) -> PipelineModel:
    return PipelineModel(
        embed=Same, sections=[(block, count)], head=Same, token_drop=drop
    )


def run(
    drop: RandomLTD,
    step: int | None = 0,
    *,
    block: Any = AddOne,
    key: int = 0,
    training: bool = True,
    **keywords: Any,
) -> np.ndarray:
    x = jnp.zeros((3, TOKENS, 4))
    network = model_of(drop, block).init(0, x, **keywords)._network
    variables = network.init(jax.random.key(0))
    how: dict[str, Any] = {"step": None if step is None else jnp.int32(step)}
    model = WholeModel(
        network, variables, jax.random.key(key), training=training, **how
    )
    return np.asarray(model(x, **keywords))


@pytest.mark.parametrize(
    ("step", "tokens"), [(None, 2), (0, 2), (1, 2), (2, 4), (3, 6), (4, 8), (99, 8)]
)
def test_middle_blocks_see_as_many_tokens_as_the_step_says(
    step: int | None, tokens: int
) -> None:
    """Of five blocks the first and the last see all; the others pass by."""
    passed = run(DROP, step)
    assert passed.min() >= 2
    assert passed[0, :, 0].sum() == 2 * TOKENS + 3 * tokens
    np.testing.assert_array_equal(passed, passed[:1, :, :1] + 0 * passed)


def test_blocks_steps_and_microbatches_draw_their_own_tokens() -> None:
    def passed(drop: RandomLTD, keys: int) -> np.ndarray:
        """Blocks that each token has passed, [keys, T]."""
        x = jnp.zeros((1, TOKENS, 1))
        network = model_of(drop).init(0, x)._network
        variables = network.init(jax.random.key(0))

        def of_key(key: jax.Array) -> jax.Array:
            return WholeModel(network, variables, key, training=True)(x)[0, :, 0]

        return np.asarray(jax.jit(jax.vmap(of_key))(jax.random.split(KEY, keys)))

    found = passed(DROP, 8)
    assert len({tuple(each) for each in found}) > 4
    assert (found.max(axis=1) < 5).any(), "blocks draw different tokens"
    seen = passed(dataclasses.replace(DROP, first=2, last=2), 400) == 5
    np.testing.assert_array_equal(seen.sum(axis=1), 2)
    np.testing.assert_allclose(seen.mean(axis=0), 2 / TOKENS, atol=0.07)


def test_an_evaluation_sees_all_tokens() -> None:
    np.testing.assert_array_equal(run(DROP, training=False), 5.0)


def test_kept_tokens_have_their_positions_and_segments() -> None:
    drop = dataclasses.replace(DROP, first=0, last=-1, positions="positions_BT")
    found = run(drop, block=AddPosition)
    times = found[0, 1:, 0] / np.arange(1, TOKENS)
    np.testing.assert_array_equal(times, times.round())
    assert 0 < times.sum() <= 5 * 2
    given = np.arange(7, 7 + TOKENS)[None].repeat(3, 0)
    found = run(drop, block=AddPosition, positions_BT=given)
    times = found[0, :, 0] / given[0]
    assert times.sum() == 5 * 2
    segments = np.arange(TOKENS)[None].repeat(3, 0)
    found = run(drop, block=AddPosition, segment_ids_BT=segments)
    np.testing.assert_array_equal(found[0, 1:, 0] % (101 * segments[0, 1:]), 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": 3}, "RandomLTD: start=3 must be a positive multiple of multiple=2"),
        ({"start": 0}, "RandomLTD: start=0 must be a positive multiple"),
        ({"steps": 0}, "RandomLTD: steps=0 must be at least 1"),
        ({"multiple": 0}, "RandomLTD: multiple=0 must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(DROP, **change)


class Flat(nnx.Module):
    """Has no dim of tokens."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x[:, 0] * self.scale if x.ndim > 2 else x * self.scale


@pytest.mark.parametrize(
    ("change", "block", "said"),
    [
        ({"last": 5}, AddOne, r"last=5 is none of the model's 5 blocks; give 0 to 4"),
        ({"first": -6}, AddOne, r"first=-6 is none of the model's 5 blocks"),
        ({"first": 3, "last": 1}, AddOne, r"first=3 is behind last=1 of 5 blocks"),
        ({"start": 10}, AddOne, r"start=10 must be at most the 8 tokens of a row in"),
        (
            {"positions": "positions_BT"},
            AddOne,
            r"positions='positions_BT' is not a keyword of the blocks of 'blocks'",
        ),
    ],
)
def test_models_without_such_blocks_or_tokens_are_refused(
    change: dict, block: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run(dataclasses.replace(DROP, **change), block=block)


def test_blocks_without_a_dim_of_tokens_are_refused() -> None:
    flat = dataclasses.replace(model_of(DROP), embed=Flat)
    with pytest.raises(
        ValueError, match=r"pass on \{'': \(3, 4\)\}, but RandomLTD needs"
    ):
        flat.init(0, jnp.zeros((3, TOKENS, 4)))
