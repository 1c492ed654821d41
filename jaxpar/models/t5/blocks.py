"""What are the blocks of a T5: those of the encoder, and those of the decoder?

Blocks pass a tree of arrays on, from which each takes its own residual stream and what
its stack shares.
"""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.models.attention import Attention, Heads
from jaxpar.models.block import TransformerBlock, gather_tokens
from jaxpar.models.blocked_attention import Scoring
from jaxpar.models.mlp import MLP
from jaxpar.models.norms import RMSNorm
from jaxpar.models.t5.config import T5Config
from jaxpar.models.t5.relative_bias import relative_bias

Hidden = dict[str, Float[Array, "..."]]
"""What blocks pass on, by name.

In the encoder: "x", its residual stream [B, S, D]; "target", that of the decoder [B, T,
D]; "encoder_bias" and "decoder_bias", the tables of relative positions, fp32, once for
each row [B, R, N]. In the decoder: "x" [B, T, D]; "memory", what the encoder returns
[B, S, D]; "decoder_bias".
"""


class T5EncoderBlock(TransformerBlock):
    """Attention to all tokens of a row, then an MLP.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.buckets = config.buckets(causal=False)
        super().__init__(
            _attention(config, causal=False, rngs=rngs),
            _mlp(config, rngs),
            make_norm=functools.partial(make_norm, config),
            dropout=config.dropout,
            sequence_parallel=config.sequence_parallel,
            rngs=rngs,
        )

    def __call__(
        self, hidden: Hidden, *, segment_ids_BS: Int[Array, "B S"] | None = None
    ) -> Hidden:
        """Run the block.

        Args:
          hidden: of the encoder.
          segment_ids_BS: tokens attend only to tokens of their own segment, and
            padding is 0; None where each row is one segment.

        Returns:
          The same, with another residual stream.
        """
        x_BSD, length = hidden["x"], hidden["x"].shape[1]
        # All rows have the same table: the gradient of the first is that of all.
        table_RN = hidden["encoder_bias"][0]
        bias_NSS = relative_bias(table_RN, self.buckets, length, length)
        x_BSD = self.run(x_BSD, segment_ids_BT=segment_ids_BS, bias_NTS=bias_NSS)
        return hidden | {"x": x_BSD}


class T5DecoderBlock(TransformerBlock):
    """Causal attention, then attention to the encoder's result, then an MLP.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.buckets = config.buckets(causal=True)
        super().__init__(
            _attention(config, causal=True, rngs=rngs),
            _mlp(config, rngs),
            make_norm=functools.partial(make_norm, config),
            dropout=config.dropout,
            sequence_parallel=config.sequence_parallel,
            rngs=rngs,
        )
        self.cross_attention = _attention(config, causal=False, rngs=rngs)
        self.cross_norm = make_norm(config)

    def __call__(
        self,
        hidden: Hidden,
        *,
        segment_ids_BS: Int[Array, "B S"] | None = None,
        decoder_segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Hidden:
        """Run the block.

        Args:
          hidden: of the decoder.
          segment_ids_BS: of the encoder's tokens.
          decoder_segment_ids_BT: of the decoder's tokens, which attend only to tokens
            of their own segment on both sides; None where each row is segment 1.

        Returns:
          The same, with another residual stream.
        """
        x_BTD, length = hidden["x"], hidden["x"].shape[1]
        table_RN = hidden["decoder_bias"][0]
        bias_NTT = relative_bias(table_RN, self.buckets, length, length)
        own = {"segment_ids_BT": decoder_segment_ids_BT, "bias_NTS": bias_NTT}
        attend = functools.partial(self.attention, **own)
        x_BTD = self.add(x_BTD, attend, self.attention_norm)

        queries_BT = decoder_segment_ids_BT
        if queries_BT is None and segment_ids_BS is not None:
            queries_BT = jnp.ones(x_BTD.shape[:2], segment_ids_BS.dtype)
        cross = functools.partial(
            self.cross_attention,
            memory_BSD=gather_tokens(hidden["memory"], self.sequence_parallel),
            segment_ids_BT=queries_BT,
            memory_segment_ids_BS=segment_ids_BS,
        )
        x_BTD = self.add(x_BTD, cross, self.cross_norm)
        x_BTD = self.add(x_BTD, self.mlp, self.mlp_norm)
        return hidden | {"x": x_BTD}


def make_norm(config: T5Config) -> RMSNorm:
    """Make one of the model's norms."""
    return RMSNorm(config.width, epsilon=config.norm_epsilon)


def _attention(config: T5Config, *, causal: bool, rngs: nnx.Rngs) -> Attention:
    """Attention that does not scale its scores: its queries begin smaller instead."""
    width, heads, size = config.width, config.num_heads, config.head_size
    stddevs = {
        "query": (width * size) ** -0.5,
        "key": width**-0.5,
        "value": width**-0.5,
        "output": (heads * size) ** -0.5,
    }
    return Attention(
        width,
        Heads(heads, heads, size),
        biases=(),
        output_stddev=stddevs,
        flatten=not config.sequence_parallel,
        implementation=config.attention,
        scoring=Scoring(scale=1.0, causal=causal),
        rngs=rngs,
    )


def _mlp(config: T5Config, rngs: nnx.Rngs) -> MLP:
    return MLP(
        config.width,
        config.hidden_width,
        activation=config.activation,
        bias=False,
        stddev=config.width**-0.5,
        output_stddev=config.hidden_width**-0.5,
        flatten=not config.sequence_parallel,
        rngs=rngs,
    )
