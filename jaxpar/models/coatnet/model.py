"""What is a CoAtNet: blocks that convolve, then blocks that attend, on smaller maps."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from jaxpar.model.blocks import PipelineModel
from jaxpar.models.coatnet.attention_block import NORM_EPSILON, GridAttentionBlock
from jaxpar.models.coatnet.config import NUM_LEVELS, CoatnetConfig
from jaxpar.models.coatnet.mbconv import MBConv, gelu, make_channel_norm
from jaxpar.models.conv import Conv
from jaxpar.models.layers import Linear
from jaxpar.models.norms import LayerNorm


def make_coatnet(config: CoatnetConfig) -> PipelineModel:
    """Make a classifier of images: two sizes of maps are convolved, two attended to.

    ``model(image_BHWC)`` returns fp32 logits [B, num_classes]. Images are floats, or
    integers from 0 to 255, which are divided by 255. The first block of each size
    stands between the sections of equal blocks behind it; that of S1 is in the
    embedding.

    With ``norm="batch"`` the model has running statistics, so the engine gives it full
    micro-batches, and refuses a pipeline. With ``norm="group"`` it trains on any mesh.

    Args:
      config: the shape of the model.

    Returns:
      The model, for ``jaxpar.initialize(model=...)``; `PipelineModel.init` makes one to
      call.

    Example:
      >>> from jaxpar.models.coatnet.presets import coatnet_config
      >>> image_BHWC = jnp.zeros((1, 32, 32, 3))
      >>> model = make_coatnet(coatnet_config("coatnet-tiny")).init(0, image_BHWC)
      >>> model(image_BHWC).shape
      (1, 10)

    Source: Dai et al., "CoAtNet: Marrying Convolution and Attention for All Data Sizes"
    (2021).
    """
    return PipelineModel(
        embed=functools.partial(CoatnetStem, config),
        sections=_sections(config),
        head=functools.partial(CoatnetHead, config),
        remat=config.remat,
        unroll=config.unroll,
        allow_uneven=config.allow_uneven,
    )


def _sections(config: CoatnetConfig) -> dict[str, Any]:
    """Equal blocks by level, and the first block of a level before them."""
    found: dict[str, Any] = {}
    for level in range(NUM_LEVELS):
        block = make_block(config, level)
        if level:
            found[f"s{level + 1}_first"] = functools.partial(block, is_first=True)
        found[f"s{level + 1}"] = (block, config.depths[level] - 1)
    return found


def make_block(config: CoatnetConfig, level: int) -> functools.partial:
    """A factory of a level's blocks; S1 is level 0."""
    kind = MBConv if level < NUM_LEVELS // 2 else GridAttentionBlock
    return functools.partial(kind, config, level)


class CoatnetStem(nnx.Module):
    """S0, two convolutions, and the first block of S1.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: CoatnetConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.stem_width
        self.conv_1 = Conv(
            (config.channels, width),
            (None, "embed"),
            stride=config.stem_stride,
            rngs=rngs,
        )
        self.norm = make_channel_norm(config, width)
        self.conv_2 = Conv((width, width), (None, "embed"), rngs=rngs)
        self.s1_first = make_block(config, 0)(is_first=True, rngs=rngs)

    def __call__(self, image_BHWC: Num[Array, "B H W C"]) -> Float[Array, "B h w D"]:
        """Turn images into the maps of S1.

        Args:
          image_BHWC: floats, or integers from 0 to 255.

        Returns:
          Maps of features.

        Raises:
          ValueError: if the images are not of the config's size.
        """
        config = self.config
        right = config.image_size, config.image_size, config.channels
        if image_BHWC.shape[1:] != right:
            raise ValueError(
                f"image_BHWC: images have shape {image_BHWC.shape[1:]}, but the model "
                f"is for {right} (CoatnetConfig.image_size and channels), on which "
                "its table of offsets depends; resize them, or make the config theirs."
            )
        dtype = self.conv_1.kernel.dtype
        x_BHWC = image_BHWC.astype(dtype)
        if jnp.issubdtype(image_BHWC.dtype, jnp.integer):
            x_BHWC = x_BHWC / 255
        x_BHWC = gelu(self.norm(self.conv_1(x_BHWC)))
        return self.s1_first(self.conv_2(x_BHWC))


class CoatnetHead(nnx.Module):
    """The mean of all places, a norm, and two matmuls around a tanh.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` stream.
    """

    def __init__(self, config: CoatnetConfig, *, rngs: nnx.Rngs):
        width = config.widths[-1]
        self.norm = LayerNorm(width, epsilon=NORM_EPSILON)
        self.hidden = Linear((width, width), ("embed", "mlp"), rngs=rngs)
        self.logits = Linear((width, config.num_classes), ("mlp", None), rngs=rngs)

    def __call__(self, x_BHWD: Float[Array, "B H W D"]) -> Float[Array, "B V"]:
        """Classify.

        Args:
          x_BHWD: the maps of S4.

        Returns:
          Logits, fp32.
        """
        mean_BD = self.norm(x_BHWD.mean((1, 2)))
        logits_BV = self.logits(jnp.tanh(self.hidden(mean_BD)))
        return logits_BV.astype(jnp.float32)
