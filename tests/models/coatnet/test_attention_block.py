"""Do the attending blocks know offsets, and only those?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.models.coatnet.attention_block import GridAttentionBlock, GridBias, offsets
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.conv import halve

CONFIG = CoatnetConfig(
    image_size=32, stem_stride=1, widths=(8, 8, 8, 16), stem_width=8, head_size=4
)


def maps(*shape: int) -> jax.Array:
    drawn = np.random.default_rng(0).normal(size=shape)
    return jnp.asarray(drawn, jnp.float32)


def test_bias_depends_on_the_offset_alone():
    bias_NTS = np.asarray(GridBias(3, 2, rngs=nnx.Rngs(0))())
    assert bias_NTS.shape == (2, 9, 9)
    of_places = bias_NTS.reshape(2, 3, 3, 3, 3)
    found: dict[tuple[int, int], np.ndarray] = {}
    for i, j, k, m in np.ndindex(3, 3, 3, 3):
        own = of_places[:, i, j, k, m]
        np.testing.assert_array_equal(found.setdefault((i - k, j - m), own), own)
    assert len({tuple(own) for own in found.values()}) == len(found) == 25


def test_offsets_are_numbered_by_rows():
    numbers = offsets(4)
    assert numbers[5, 5] == 3 * 7 + 3, "a place and itself"
    assert numbers[4, 0] == numbers[5, 5] + 7, "one row below its key"
    assert numbers[1, 0] == numbers[5, 5] + 1, "one column right of its key"
    assert set(numbers.flat) == set(range(49))


def test_bias_is_added_to_scores_and_has_a_gradient():
    block: Any = GridAttentionBlock(CONFIG, 3, rngs=nnx.Rngs(0))
    x = maps(2, 2, 2, 16)
    before = block(x)
    # One offset wins: a place sees only the one above it, where there is one.
    up = int(offsets(2)[2, 0])
    block.relative.table[...] = jnp.zeros((9, 4)).at[up].set(1e4)
    normal = block.attention_norm(x).reshape(2, 4, 16)
    values = block.attention.value(normal)
    seen = block.attention(normal, bias_NTS=block.relative())
    np.testing.assert_allclose(
        seen[:, 2:], block.attention.output(values[:, :2]), atol=1e-6
    )
    assert not np.allclose(block(x), before)
    graphdef, state = nnx.split(block)
    weights = maps(2, 2, 2, 16)
    state["relative"]["table"].set_value(jnp.zeros((9, 4)))

    def total(state: nnx.State) -> jax.Array:
        return (nnx.merge(graphdef, state)(x) * weights).sum()

    grads = jax.jit(jax.grad(total))(state)
    assert (np.abs(grads["relative"]["table"].get_value()) > 0).all()


def test_first_block_halves_the_map_behind_its_norm():
    block: Any = GridAttentionBlock(CONFIG, 3, is_first=True, rngs=nnx.Rngs(0))
    x = maps(2, 4, 4, 8)
    normal = halve(block.attention_norm(x)).reshape(2, 4, 8)
    update = block.attention(normal, bias_NTS=block.relative())
    stream = block.shortcut(halve(x)).reshape(2, 4, 16) + update
    stream = stream + block.mlp(block.mlp_norm(stream))
    np.testing.assert_allclose(block(x), stream.reshape(2, 2, 2, 16), rtol=1e-5)


def test_first_block_of_equal_widths_projects_nothing():
    block = GridAttentionBlock(CONFIG, 2, is_first=True, rngs=nnx.Rngs(0))
    assert block.shortcut is None


def test_places_see_all_places():
    block: Any = GridAttentionBlock(CONFIG, 3, rngs=nnx.Rngs(0))
    x = maps(1, 2, 2, 16)
    first = jax.jit(jax.grad(lambda x: block(x)[0, 0, 0, 0]))(x)
    assert (np.abs(first[0]).max(-1) > 0).all()


def test_keys_have_a_bias_where_asked_for():
    for asked in (False, True):
        config = CoatnetConfig(key_bias=asked)
        block: Any = nnx.eval_shape(
            lambda c=config: GridAttentionBlock(c, 2, rngs=nnx.Rngs(0))
        )
        assert (block.attention.key.bias is not None) == asked
