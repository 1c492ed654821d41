"""What comes before and after a decoder's blocks: the embedding, and the logits."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.losses import cross_entropy
from jaxpar.losses.logits import hide_columns
from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.block import constrain_residual, gather_tokens, make_dropout
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.experts.stream import Hidden, begin, router_losses, stream_of
from jaxpar.models.layers import Embedding, Linear, add_to_rows, project_to_logits
from jaxpar.models.norms import LayerNorm, RMSNorm
from jaxpar.sharding.constrain import constrain

Metrics = dict[str, jax.Array]


def make_norm(config: DecoderConfig) -> LayerNorm | RMSNorm:
    """Make the normalisation that a config names."""
    epsilon = config.norm_epsilon
    if config.norm == "layernorm":
        return LayerNorm(config.width, bias=config.bias, epsilon=epsilon)
    plus_one = config.norm == "rmsnorm_plus_one"
    return RMSNorm(config.width, epsilon=epsilon, plus_one=plus_one)


class Embed(nnx.Module):
    """Look tokens up, add learned positions, drop.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        vocab_size, width = config.vocab_size, config.width
        self.embedding = Embedding((vocab_size, width), ("vocab", "embed"), rngs=rngs)
        self.positions = (
            Embedding((config.seq_len, width), (None, "embed"), rngs=rngs)
            if config.positions == "learned"
            else None
        )
        self.dropout = make_dropout(config.dropout, rngs)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        positions_BT: Int[Array, "#B T"] | None = None,
    ) -> Hidden:
        """Embed tokens.

        Args:
          tokens_BT: token numbers, from 0 to vocab_size - 1.
          positions_BT: position of each token; None for 0, 1, 2 and so on.

        Returns:
          The residual stream before the first block.

        Raises:
          ValueError: if T exceeds the number of learned positions.
        """
        config = self.config
        # Replicated first: if sharded over tokens at once, the lookup would send
        # tokens.
        x_BTD = constrain(self.embedding(tokens_BT), DATA, None, None)
        if config.embedding_scale is not None:
            # Rounded as the published model rounds it.
            x_BTD = x_BTD * jnp.asarray(config.embedding_scale, x_BTD.dtype)
        x_BTD = constrain_residual(x_BTD, config.sequence_parallel)
        if self.positions is not None:
            length = tokens_BT.shape[1]
            if positions_BT is not None:
                x_BTD = x_BTD + self.positions(positions_BT)
            elif length <= config.seq_len:
                x_BTD = add_to_rows(x_BTD, self.positions.table[:length])
            else:
                raise ValueError(
                    f"tokens_BT: a row of {length} tokens is longer than the "
                    f"{config.seq_len} learned positions (DecoderConfig.seq_len); "
                    "cut the rows, raise seq_len, or use positions='rotary'."
                )
        if self.dropout is not None:
            x_BTD = self.dropout(x_BTD)
        x_BTD = constrain_residual(x_BTD, config.sequence_parallel)
        return begin(x_BTD, config.experts)


class Head(nnx.Module):
    """Normalise, and multiply by the head or by the transposed embedding table.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` stream.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.final_norm = make_norm(config)
        width, vocab = config.width, config.vocab_size
        self.logits = (
            Embedding((vocab, width), ("vocab", "embed"), rngs=rngs)
            if config.tied_embedding
            else Linear((width, vocab), ("embed", "vocab"), bias=False, rngs=rngs)
        )

    def __call__(
        self,
        hidden: Hidden,
        *,
        targets_BT: Int[Array, "B T"] | None = None,
        weights_BT: Float[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"] | Float[Array, ""] | tuple[jax.Array, Metrics]:
        """Predict each next token, or sum the loss of known ones.

        Args:
          hidden: the residual stream after the last block, as a block returns it.
          targets_BT: the token to predict at each place.
          weights_BT: of each target; None for 1.

        Returns:
          Logits, fp32; with targets, the weighted sum of their cross entropies. Of a
          model with experts (that sum and the routers' losses, metrics).
        """
        tokens = self.config.sequence_parallel
        hidden_BTD = gather_tokens(self.final_norm(stream_of(hidden)), tokens)
        logits = self.logits
        is_tied = isinstance(logits, Embedding)
        kernel_DV = logits.table[...].T if is_tied else logits.kernel[...]
        if targets_BT is None:
            logits_BTV = project_to_logits(hidden_BTD, kernel_DV, flatten=not tokens)
            if (cap := self.config.logits_softcap) is not None:
                logits_BTV = cap * jnp.tanh(logits_BTV / cap)
            return hide_columns(logits_BTV, self.config.num_tokens)
        loss = cross_entropy(
            *(hidden_BTD, kernel_DV, targets_BT, weights_BT),
            soft_cap=self.config.logits_softcap,
            logits_dtype=self.config.logits_dtype,
            num_classes=self.config.num_tokens,
            tokens_axis=TENSOR if tokens else None,
        )
        config = self.config
        router = router_losses(hidden, config.experts, config.num_expert_layers)
        if router is None:
            return loss.total
        return loss.total + router.loss * loss.weight, router.metrics
