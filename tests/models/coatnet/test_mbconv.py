"""Is a convolving block what it says: its order, its stride, its shortcut?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.channel_norms import BatchNorm, GroupNorm
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.coatnet.mbconv import MBConv, SqueezeExcite, gelu, make_channel_norm
from jaxpar.models.conv import halve

CONFIG = CoatnetConfig(
    stem_width=8, widths=(8, 16, 16, 16), head_size=8, norm="group", norm_groups=2
)


def maps(*shape: int) -> jax.Array:
    drawn = np.random.default_rng(0).normal(size=shape)
    return jnp.asarray(drawn, jnp.float32)


def replaced(**fields: Any) -> CoatnetConfig:
    own = {"stem_width": 8, "widths": (8, 16, 16, 16), "head_size": 8}
    return CoatnetConfig(**{**own, "norm": "group", "norm_groups": 2, **fields})


@pytest.mark.parametrize("stride_in", ["depthwise", "widen"])
def test_first_block_halves_the_map_where_it_is_asked_to(stride_in: str):
    block: Any = MBConv(
        replaced(stride_in=stride_in), 1, is_first=True, rngs=nnx.Rngs(0)
    )
    x = maps(2, 6, 6, 8)
    normal = block.norm(x)
    normal = normal[:, ::2, ::2] if stride_in == "widen" else normal
    inner = block.conv(gelu(block.widen_norm(block.widen(normal))))
    assert inner.shape == (2, 3, 3, 64)
    update = block.narrow(block.weigh(gelu(block.conv_norm(inner))))
    want = block.shortcut(halve(x)) + update
    np.testing.assert_allclose(block(x), want, rtol=1e-6)


def test_other_blocks_add_to_their_input():
    block: Any = MBConv(CONFIG, 1, rngs=nnx.Rngs(0))
    block.narrow.kernel[...] *= 0
    block.narrow.bias[...] = jnp.arange(16.0)
    x = maps(2, 5, 3, 16)
    np.testing.assert_array_equal(block(x), x + jnp.arange(16.0))


def test_first_block_of_equal_widths_projects_nothing():
    assert MBConv(CONFIG, 0, is_first=True, rngs=nnx.Rngs(0)).shortcut is None


def test_channels_are_multiplied_by_a_number_of_each_row():
    layer = SqueezeExcite(6, 2, rngs=nnx.Rngs(0))
    x = maps(3, 4, 4, 6)
    factors = np.asarray(layer(x) / x)
    of_rows = factors[:, :1, :1]
    np.testing.assert_allclose(factors, np.broadcast_to(of_rows, x.shape), rtol=1e-5)
    mean = np.asarray(x).mean((1, 2))
    hidden = mean @ np.asarray(layer.squeeze.kernel[...])
    hidden = hidden / (1 + np.exp(-hidden)) @ np.asarray(layer.excite.kernel[...])
    np.testing.assert_allclose(of_rows[:, 0, 0], 1 / (1 + np.exp(-hidden)), rtol=1e-5)


def test_dropped_rows_are_the_shortcut_alone():
    block: Any = MBConv(replaced(stochastic_depth=0.5), 1, rngs=nnx.Rngs(0))
    x = maps(16, 2, 2, 16)
    update = np.asarray(block(x) - x).reshape(16, -1)
    block.eval()
    whole = np.asarray(block(x) - x).reshape(16, -1)
    dropped = np.abs(update).max(1) < 1e-6
    assert 2 < dropped.sum() < 14
    np.testing.assert_allclose(update[~dropped], 2 * whole[~dropped], atol=1e-4)


def test_norm_is_that_of_the_config():
    assert isinstance(make_channel_norm(replaced(norm="batch"), 8), BatchNorm)
    norm = make_channel_norm(CONFIG, 8, "mlp")
    assert isinstance(norm, GroupNorm)
    assert norm.scale.get_metadata("out_sharding") == ("mlp",)


def test_activation_saves_its_argument_alone():
    _, vjp = jax.vjp(gelu, maps(3, 4))
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)] == [(3, 4)]
