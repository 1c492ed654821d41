"""Does a convolution sum over its neighbours, and is the average that of squares?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.models.conv import Conv, convolve_depthwise, halve
from tests.models.grouped_convolution import convolve_in_groups

WAYS = convolve_depthwise, convolve_in_groups


def plainly(x: np.ndarray, kernel: np.ndarray, stride: int, groups: int) -> np.ndarray:
    """A loop over the results' places."""
    size, outputs = kernel.shape[0], kernel.shape[3]
    around = (size - 1) // 2
    padded = np.pad(x, ((0, 0), (around, around), (around, around), (0, 0)))
    height, width = (-(-side // stride) for side in x.shape[1:3])
    found = np.zeros((len(x), height, width, outputs))
    for i, j in np.ndindex(height, width):
        window = padded[:, stride * i :, stride * j :][:, :size, :size]
        if groups == 1:
            found[:, i, j] = np.einsum("bhwc,hwcf->bf", window, kernel)
        else:
            found[:, i, j] = np.einsum("bhwc,hwc->bc", window, kernel[:, :, 0])
    return found


@pytest.mark.parametrize(
    ("depthwise", "stride", "size"), [(False, 1, 3), (False, 2, 3), (True, 2, 5)]
)
def test_convolution_is_a_sum_over_neighbours(depthwise: bool, stride: int, size: int):
    width = (4, 4) if depthwise else (4, 6)
    layer = Conv(
        width,
        (None, "mlp"),
        size=size,
        stride=stride,
        depthwise=depthwise,
        rngs=nnx.Rngs(0),
    )
    kernel = np.asarray(layer.kernel[...])
    assert kernel.shape == (size, size, 1 if depthwise else 4, width[1])
    assert layer.kernel.get_metadata("out_sharding") == (None, None, None, "mlp")
    x = np.random.default_rng(0).normal(size=(2, 7, 6, 4)).astype(np.float32)
    want = plainly(x, kernel, stride, 4 if depthwise else 1)
    np.testing.assert_allclose(layer(jnp.asarray(x)), want, atol=1e-4)


@pytest.mark.parametrize(("stride", "size"), [(1, 3), (2, 3), (3, 5)])
def test_depthwise_has_the_values_and_gradients_of_as_many_groups(
    stride: int, size: int
):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 9, 8, 6)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(size, size, 6)), jnp.float32)

    def found(convolve: Any) -> Any:
        def total(x: jax.Array, kernel: jax.Array) -> Any:
            made = convolve(x, kernel, stride)
            return jnp.square(made).sum(), made

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(x, kernel)

    pairs = zip(*map(jax.tree.leaves, map(found, WAYS)), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_kernels_keep_the_size_of_what_they_are_given():
    rngs = nnx.Rngs(0)
    for depthwise, outputs in ((False, 64), (True, 64 / 64)):
        layer = Conv((64, 64), (None, None), depthwise=depthwise, rngs=rngs)
        stddev = float(jnp.std(layer.kernel[...]))
        assert stddev == pytest.approx((2 / (9 * outputs)) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, r"Conv: size=4 must be odd, .*; use 5"),
        ({"depthwise": True}, r"depthwise=True .* width=\(4, 6\) changes their number"),
    ],
)
def test_convolution_that_there_is_not_raises(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Conv((4, 6), (None, None), rngs=nnx.Rngs(0), **options)


def test_half_is_the_average_of_squares():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    want = [[[2.5], [4.5]], [[10.5], [12.5]]]
    np.testing.assert_array_equal(halve(x), np.asarray([want]))


def test_half_of_an_odd_size_raises():
    with pytest.raises(ValueError, match=r"height 3 and width 4, which must be even"):
        halve(jnp.zeros((1, 3, 4, 1)))
