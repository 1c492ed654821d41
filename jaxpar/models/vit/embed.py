"""How does an image become tokens: a matmul over each patch, and learned positions."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxpar.mesh import DATA
from jaxpar.models.block import constrain_residual, make_dropout
from jaxpar.models.conv import convolve
from jaxpar.models.experts.stream import Hidden, begin
from jaxpar.models.layers import add_to_rows, multiply, named_param
from jaxpar.models.vit.config import VitConfig
from jaxpar.sharding.constrain import constrain

_POSITION_STDDEV = 0.5
"""Patches begin with a variance of about one, beside which 0.02 would hardly show: a
small ViT of digits had 85 % of them right after 500 steps with it, 93 % with 0.4.
"""


class VitEmbed(nnx.Module):
    """Multiply patches, put a class token before them, add learned positions, drop.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.width
        self.patch = PatchEmbedding(
            config.patch_size,
            config.channels,
            width,
            stride=config.stride,
            flatten=not config.sequence_parallel,
            rngs=rngs,
        )
        shape = config.num_tokens, width
        places = _POSITION_STDDEV * jax.random.normal(rngs.params(), shape)
        self.positions = named_param(places, (None, "embed"))
        is_first = config.pooling == "class_token"
        self.class_token = (
            named_param(jnp.zeros(width), ("embed",)) if is_first else None
        )
        self.dropout = make_dropout(config.dropout, rngs)

    def __call__(self, image_BHWC: Num[Array, "B H W C"]) -> Hidden:
        """Embed images.

        Args:
          image_BHWC: floats around 0, such as ``jaxpar.data.PreparedImages`` gives.

        Returns:
          The residual stream before the first block; the class token, if there is one,
          is its first.

        Raises:
          ValueError: if the images are not of the config's size and channels, or
            are integers.
        """
        config = self.config
        _check_images(image_BHWC, config)
        x_BTD = self.patch(image_BHWC)
        if self.class_token is not None:
            shape = len(x_BTD), 1, config.width
            first_B1D = constrain(jnp.broadcast_to(self.class_token[...], shape), DATA)
            x_BTD = jnp.concatenate([first_B1D, x_BTD], axis=1)
        x_BTD = constrain_residual(x_BTD, config.sequence_parallel)
        x_BTD = add_to_rows(x_BTD, self.positions[...])
        if self.dropout is not None:
            x_BTD = self.dropout(x_BTD)
        x_BTD = constrain_residual(x_BTD, config.sequence_parallel)
        return begin(x_BTD, config.experts)


class PatchEmbedding(nnx.Module):
    """A convolution over patches; where they don't overlap, one matmul over all.

    The kernel [P, P, C, D] is drawn with a standard deviation of 1 / sqrt(P P C).

    Args:
      size: height and width of a patch, pixels.
      channels: of an image.
      width: features of a patch's token.
      stride: pixels from one patch to the next; None for its size.
      flatten: as in `jaxpar.models.layers.Linear`.
      rngs: for the ``params`` stream.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), section 3.1.
    """

    def __init__(
        self,
        size: int,
        channels: int,
        width: int,
        *,
        stride: int | None = None,
        flatten: bool = True,
        rngs: nnx.Rngs,
    ):
        shape = size, size, channels, width
        kernel = jax.random.normal(rngs.params(), shape) / math.sqrt(
            math.prod(shape[:3])
        )
        self.kernel = named_param(kernel, (None, None, None, "embed"))
        self.bias = named_param(jnp.zeros(width), ("embed",))
        self.size, self.stride, self.flatten = size, stride or size, flatten

    def __call__(self, image_BHWC: Num[Array, "B H W C"]) -> Float[Array, "B T D"]:
        """Embed the patches of images, row by row from the top left.

        Args:
          image_BHWC: patches fill H and W.

        Returns:
          A token for each patch, in the kernel's dtype.
        """
        kernel = self.kernel[...]
        kernel_FD = kernel.reshape(-1, kernel.shape[-1])
        image_BHWC = image_BHWC.astype(kernel.dtype)
        if self.stride == self.size:
            patches_BTF = split_patches(image_BHWC, self.size)
            x_BTD = multiply(patches_BTF, kernel_FD, flatten=self.flatten)
        else:
            x_BTD = convolve(image_BHWC, kernel, stride=self.stride)
            x_BTD = x_BTD.reshape(len(x_BTD), -1, x_BTD.shape[-1])
        return constrain(x_BTD, DATA) + self.bias[...]


def split_patches(image_BHWC: Num[Array, "B H W C"], size: int) -> Num[Array, "B T F"]:
    """Cut images into square patches.

    Args:
      image_BHWC: H and W are multiples of `size`.
      size: height and width of a patch, pixels.

    Returns:
      Patches row by row from the top left; F is [row, column, channel] within one.

    Example:
      >>> split_patches(jnp.arange(16).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
      [2, 3, 6, 7]
    """
    B, H, W, C = image_BHWC.shape
    cut = image_BHWC.reshape(B, H // size, size, W // size, size, C)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, size * size * C)


def _check_images(image_BHWC: jax.Array, config: VitConfig) -> None:
    if image_BHWC.ndim != 4 or image_BHWC.shape[1:] != config.image_shape:
        raise ValueError(
            f"image_BHWC: images have the shape {image_BHWC.shape[1:]}, but the model "
            f"is for {config.image_shape}, [height, width, channels] "
            "(VitConfig.image_size and channels): resize or transpose them, or make "
            "the config theirs."
        )
    if not jnp.issubdtype(image_BHWC.dtype, jnp.floating):
        raise ValueError(
            f"image_BHWC: images are {image_BHWC.dtype}, but the model takes floats "
            "around 0, scaled as those it was trained on: wrap the rows in "
            "jaxpar.data.PreparedImages, which scales them."
        )
