"""The convolving blocks: widen, convolve each channel, weigh the channels, narrow.

They are made of parts that other models may use: `jaxpar.models.conv.Conv`,
`jaxpar.models.channel_norms.BatchNorm` and `jaxpar.models.channel_norms.GroupNorm`.
"""

import functools
import math

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.block import make_dropout
from jaxpar.models.channel_norms import BatchNorm, GroupNorm
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.conv import Conv, halve
from jaxpar.models.layers import Linear
from jaxpar.sharding.constrain import constrain


def make_channel_norm(
    config: CoatnetConfig, width: int, name: str = "embed"
) -> BatchNorm | GroupNorm:
    """Make the norm of convolutions that a config names.

    Args:
      config: the shape of the model.
      width: channels.
      name: their logical name.

    Returns:
      The norm.
    """
    if config.norm == "batch":
        return BatchNorm(width, name=name)
    return GroupNorm(width, config.norm_groups, name=name)


@jax.checkpoint  # Saves its argument alone.
def gelu(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """The activation of the convolutions, by the error function.

    Args:
      x: any shape.

    Returns:
      The same shape and dtype.
    """
    return jax.nn.gelu(x, approximate=False)


class MBConv(nnx.Module):
    """Widen, convolve each channel, weigh the channels, narrow; add to the input.

    A norm stands before the first matmul, as in a transformer. The first block of a
    size has a stride of 2, and adds to the average of 2 x 2 places, projected. The
    channels inside are sharded over the tensor axis.

    Args:
      config: the shape of the model.
      level: 0 for S1, 1 for S2.
      is_first: whether it is the first block of its size.
      rngs: for the ``params`` and ``dropout`` streams.

    Source: Sandler et al., "MobileNetV2" (2018), section 3; Dai et al. (2021), equation
    5. Differs: the channels inside are a multiple of those of the result.
    """

    def __init__(
        self,
        config: CoatnetConfig,
        level: int,
        *,
        is_first: bool = False,
        rngs: nnx.Rngs,
    ):
        width = config.widths[level]
        given = config.width_before(level) if is_first else width
        inner = config.expansion * width
        make_norm = functools.partial(make_channel_norm, config)
        dense = functools.partial(Linear, rngs=rngs)
        self.is_first = is_first
        self.strided = config.stride_in if is_first else None
        self.shortcut = dense((given, width), (None, "embed"), stddev=_stddev(width))
        if given == width:
            self.shortcut = None
        self.norm = make_norm(given)
        self.widen = dense(
            (given, inner), ("embed", "mlp"), bias=False, stddev=_stddev(inner)
        )
        self.widen_norm = make_norm(inner, "mlp")
        self.conv = Conv(
            (inner, inner),
            (None, "mlp"),
            stride=2 if self.strided == "depthwise" else 1,
            depthwise=True,
            rngs=rngs,
        )
        self.conv_norm = make_norm(inner, "mlp")
        squeezed = max(1, int(config.squeeze * width))
        self.weigh = SqueezeExcite(inner, squeezed, rngs=rngs)
        self.narrow = dense((inner, width), ("mlp", "embed"), stddev=_stddev(width))
        self.dropout = make_dropout(config.stochastic_depth, rngs, (1, 2, 3))

    def __call__(self, x_BHWD: Float[Array, "B H W D"]) -> Float[Array, "B h w F"]:
        """Run the block.

        Args:
          x_BHWD: maps of features.

        Returns:
          Maps of the block's width; of half the height and width, from a first block.
        """
        residual = halve(x_BHWD) if self.is_first else x_BHWD
        if self.shortcut is not None:
            residual = self.shortcut(residual)
        normal = self.norm(x_BHWD)
        if self.strided == "widen":
            normal = normal[:, ::2, ::2]
        inner = _constrain_inner(self.widen(normal))
        inner = _constrain_inner(self.conv(gelu(self.widen_norm(inner))))
        update = self.narrow(self.weigh(gelu(self.conv_norm(inner))))
        if self.dropout is not None:
            update = self.dropout(update)
        return constrain(residual + update, DATA)


class SqueezeExcite(nnx.Module):
    """Multiply each channel by a number in (0, 1), made of the means of all channels.

    Args:
      width: channels, sharded over the tensor axis.
      squeezed: features between the two matmuls.
      rngs: for the ``params`` stream.

    Source: Hu et al., "Squeeze-and-Excitation Networks" (2018), section 3. Differs: the
    inner activation is SiLU, as in EfficientNet.
    """

    def __init__(self, width: int, squeezed: int, *, rngs: nnx.Rngs):
        dense = functools.partial(Linear, rngs=rngs)
        self.squeeze = dense((width, squeezed), ("mlp", None), stddev=_stddev(squeezed))
        self.excite = dense((squeezed, width), (None, "mlp"), stddev=_stddev(width))

    def __call__(self, x_BHWC: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Weigh the channels.

        Args:
          x_BHWC: maps of features.

        Returns:
          The same shape and dtype.
        """
        mean_B11C = x_BHWC.mean((1, 2), keepdims=True)
        weights_B11C = self.excite(jax.nn.silu(self.squeeze(mean_B11C)))
        return x_BHWC * jax.nn.sigmoid(weights_B11C)


def _stddev(outputs: int) -> float:
    """Of a 1 x 1 convolution's kernel, as `Conv` has it."""
    return math.sqrt(2 / outputs)


def _constrain_inner(inner_BHWC: jax.Array) -> jax.Array:
    return constrain(inner_BHWC, DATA, None, None, TENSOR)
