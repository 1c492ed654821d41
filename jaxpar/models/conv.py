"""The convolutions of image models, over arrays [B, height, width, channels].

A 1 x 1 convolution is a matmul over the channels: `jaxpar.models.layers.Linear`.
"""

import functools
import itertools
import math
import operator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.models.layers import Names, named_param


class Conv(nnx.Module):
    """A convolution with a square kernel and zeros around the image.

    There are (size - 1) / 2 zeros on each side, so that stride 1 keeps an image's size.
    The kernel [size, size, in, out] is drawn from a normal distribution of variance
    2 / (size^2 x outputs per input), and there is no bias: a norm stands behind it.

    Args:
      width: channels in and out.
      names: logical names of the two dims.
      size: of the kernel; odd.
      stride: places between two results.
      depthwise: whether each channel is convolved with a kernel of its own,
        [size, size, 1, out].
      rngs: for the ``params`` stream.

    Raises:
      ValueError: if the size is even, or a depthwise convolution changes the width.

    Source: He et al., "Delving Deep into Rectifiers" (2015), equation 14, for the
    variance.
    """

    def __init__(
        self,
        width: tuple[int, int],
        names: Names,
        *,
        size: int = 3,
        stride: int = 1,
        depthwise: bool = False,
        rngs: nnx.Rngs,
    ):
        if size < 1 or size % 2 == 0:
            raise ValueError(
                f"Conv: size={size} must be odd, so that a result has a place of the "
                f"image at its middle; use {size + 1}."
            )
        if depthwise and width[0] != width[1]:
            raise ValueError(
                f"Conv: depthwise=True convolves each channel for itself, but "
                f"width={width} changes their number; make the two equal."
            )
        self.size, self.stride = size, stride
        self.is_depthwise = depthwise
        groups = width[0] if depthwise else 1
        shape = size, size, width[0] // groups, width[1]
        stddev = math.sqrt(2 * groups / (size * size * width[1]))
        kernel = stddev * jax.random.normal(rngs.params(), shape)
        self.kernel = named_param(kernel, (None, None, *names))

    def __call__(self, x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B h w F"]:
        """Convolve.

        Args:
          x_BHWC: images, or maps of features.

        Returns:
          Height and width divided by the stride, rounded up.
        """
        kernel, around = self.kernel[...], (self.size - 1) // 2
        if self.is_depthwise:
            return convolve_depthwise(x_BHWC, kernel[:, :, 0], self.stride)
        return convolve(x_BHWC, kernel, stride=self.stride, around=around)


def convolve(
    x_BHWC: Float[Array, "B H W C"],
    kernel: Float[Array, "size size C F"],
    *,
    stride: int,
    around: int = 0,
) -> Float[Array, "B h w F"]:
    """Convolve.

    Args:
      x_BHWC: images, or maps of features.
      kernel: the kernel.
      stride: places between two results.
      around: zeros on each side.

    Returns:
      Maps of features.
    """
    return jax.lax.conv_general_dilated(
        x_BHWC,
        kernel,
        window_strides=(stride, stride),
        padding=((around, around), (around, around)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def convolve_depthwise(
    x_BHWC: Float[Array, "B H W C"], kernel: Float[Array, "size size C"], stride: int
) -> Float[Array, "B h w C"]:
    """Convolve each channel for itself, with zeros around the image.

    It is a sum of shifted products, which compilers fuse, with their gradients: XLA's
    convolution of as many groups as channels is slow on CPUs, above all its gradients.

    Args:
      x_BHWC: maps of features.
      kernel: of an odd size.
      stride: places between two results.

    Returns:
      Height and width divided by the stride, rounded up.
    """
    size, (_, H, W, _) = kernel.shape[0], x_BHWC.shape
    height, width, around = -(-H // stride), -(-W // stride), (size - 1) // 2
    wide = jnp.pad(x_BHWC, ((0, 0), (around, around), (around, around), (0, 0)))

    def shifted(down: int, right: int) -> jax.Array:
        rows = slice(down, down + stride * (height - 1) + 1, stride)
        columns = slice(right, right + stride * (width - 1) + 1, stride)
        return wide[:, rows, columns] * kernel[down, right]

    places = [(down, right) for down in range(size) for right in range(size)]
    return functools.reduce(operator.add, itertools.starmap(shifted, places))


def halve(x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B h w C"]:
    """Average squares of 2 x 2 places.

    Args:
      x_BHWC: maps of an even height and width.

    Returns:
      Maps of half the height and width.

    Raises:
      ValueError: if height or width is odd.
    """
    B, H, W, C = x_BHWC.shape
    if H % 2 or W % 2:
        raise ValueError(
            f"halve: x_BHWC has height {H} and width {W}, which must be even; give the "
            "model images whose size its strides divide."
        )
    return x_BHWC.reshape(B, H // 2, 2, W // 2, 2, C).mean((2, 4))
