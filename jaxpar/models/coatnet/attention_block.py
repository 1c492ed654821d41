"""The attending blocks: places see each other, and know how far apart they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxpar.mesh import TENSOR
from jaxpar.models.attention import Attention, Heads
from jaxpar.models.block import TransformerBlock
from jaxpar.models.blocked_attention import Scoring
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.conv import halve
from jaxpar.models.layers import Linear, named_param
from jaxpar.models.mlp import MLP
from jaxpar.models.norms import LayerNorm
from jaxpar.sharding.constrain import constrain

NORM_EPSILON = 1e-6
"""Added to the variance by the layer norms."""


class GridBias(nnx.Module):
    """What is added to the score of two places of a map: by head, and by their offset.

    The same for every pair of places with the same offset, and for every input, as a
    convolution's kernel is.

    Args:
      side: height and width of the map.
      num_heads: N.
      rngs: for the ``params`` stream.

    Source: Dai et al. (2021), equation 3, where it is added before the softmax.
    """

    def __init__(self, side: int, num_heads: int, *, rngs: nnx.Rngs):
        shape = (2 * side - 1) ** 2, num_heads
        table = 0.02 * jax.random.normal(rngs.params(), shape)
        self.table = named_param(table, (None, "heads"))
        self.side = side

    def __call__(self) -> Float[Array, "N T T"]:
        """Look the biases up.

        Returns:
          The bias of each query place and key place, in rows of the map; heads are
          sharded over the tensor axis.
        """
        bias_TTN = self.table[...][offsets(self.side)]
        return constrain(bias_TTN.transpose(2, 0, 1), TENSOR, None, None)


def offsets(side: int) -> np.ndarray:
    """Number the offsets of every two places of a square map.

    Args:
      side: height and width of the map.

    Returns:
      [T, T] numbers from 0 to (2 side - 1)^2 - 1: the offset of query from key, by rows
      and then by columns, each plus side - 1.

    Example:
      >>> offsets(2)[0].tolist()
      [4, 3, 1, 0]
    """
    rows, columns = np.divmod(np.arange(side * side), side)
    rows, columns = (x[:, None] - x + side - 1 for x in (rows, columns))
    return rows * (2 * side - 1) + columns


class GridAttentionBlock(TransformerBlock):
    """Attention of all places of a map to each other, then an MLP.

    The first block of a size averages 2 x 2 places behind its first norm, and adds to
    the average of the input, projected.

    Args:
      config: the shape of the model.
      level: 2 for S3, 3 for S4.
      is_first: whether it is the first block of its size.
      rngs: for the ``params`` and ``dropout`` streams.
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
        num_heads = width // config.head_size
        attention = Attention(
            (given, width),
            Heads(num_heads, num_heads, config.head_size),
            biases=("query", "value", "output", *["key"] * config.key_bias),
            output_stddev=_output_stddev(config),
            implementation=config.attention,
            scoring=Scoring(causal=False),
            rngs=rngs,
        )
        mlp = MLP(
            width,
            config.expansion * width,
            activation="gelu_exact",
            bias=True,
            output_stddev=_output_stddev(config),
            rngs=rngs,
        )
        super().__init__(
            attention,
            mlp,
            make_norm=functools.partial(LayerNorm, width, epsilon=NORM_EPSILON),
            dropout=config.stochastic_depth,
            drop_rows=True,
            rngs=rngs,
        )
        self.is_first = is_first
        self.relative = GridBias(config.map_sizes[level], num_heads, rngs=rngs)
        if is_first:
            self.attention_norm = LayerNorm(given, epsilon=NORM_EPSILON)
        self.shortcut = (
            None
            if given == width
            else Linear((given, width), (None, "embed"), rngs=rngs)
        )

    def __call__(self, x_BHWD: Float[Array, "B H W D"]) -> Float[Array, "B h w F"]:
        """Run the block.

        Args:
          x_BHWD: maps of features.

        Returns:
          Maps of the block's width; of half the height and width, from a first block.
        """
        bias_NTS = self.relative()
        if not self.is_first:
            x_BTD = self.run(_as_tokens(x_BHWD), bias_NTS=bias_NTS)
            return x_BTD.reshape(x_BHWD.shape)
        normal_BTD = _as_tokens(halve(self.attention_norm(x_BHWD)))
        residual = halve(x_BHWD)
        if self.shortcut is not None:
            residual = self.shortcut(residual)
        update_BTD = self.attention(normal_BTD, bias_NTS=bias_NTS)
        x_BTD = self.join(_as_tokens(residual), update_BTD)
        return self.add(x_BTD, self.mlp, self.mlp_norm).reshape(residual.shape)


def _as_tokens(x_BHWD: jax.Array) -> jax.Array:
    B, *_, D = x_BHWD.shape
    return jnp.reshape(x_BHWD, (B, -1, D))


def _output_stddev(config: CoatnetConfig) -> float:
    """Each block adds two matmuls to the residual stream."""
    return 0.02 * (2 * sum(config.depths)) ** -0.5
