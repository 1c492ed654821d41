"""What stands before, between and behind the stacks of a T5?"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.losses import cross_entropy
from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.block import constrain_residual, gather_tokens, make_dropout
from jaxpar.models.layers import Embedding, Linear, named_param, project_to_logits
from jaxpar.models.t5.blocks import Hidden, make_norm
from jaxpar.models.t5.config import T5Config
from jaxpar.sharding.constrain import constrain


class T5Embed(nnx.Module):
    """Look up the tokens of both sides, and give each row the tables of the biases.

    Each table is one parameter, here. Blocks on any stage read it from their rows: so
    its gradient goes the way of the activations.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        shape, names = (config.vocab_size, config.width), ("vocab", "embed")
        self.embedding = Embedding(shape, names, stddev=1.0, rngs=rngs)

        def table() -> nnx.Param:
            drawn = jax.random.normal(
                rngs.params(), (config.num_buckets, config.num_heads)
            )
            return named_param(config.width**-0.5 * drawn, (None, "heads"))

        self.encoder_bias, self.decoder_bias = table(), table()
        self.dropout = make_dropout(config.dropout, rngs)

    def __call__(
        self, tokens_BS: Int[Array, "B S"], decoder_tokens_BT: Int[Array, "B T"]
    ) -> Hidden:
        """Embed tokens.

        Args:
          tokens_BS: those that the encoder reads, from 0 to vocab_size - 1.
          decoder_tokens_BT: those that the decoder reads.

        Returns:
          The hidden state of the encoder's first block.
        """
        return {
            "x": self._embedded(tokens_BS),
            "target": self._embedded(decoder_tokens_BT),
            "encoder_bias": self._by_row(self.encoder_bias[...], len(tokens_BS)),
            "decoder_bias": self._by_row(self.decoder_bias[...], len(tokens_BS)),
        }

    def _embedded(self, tokens_BT: jax.Array) -> jax.Array:
        # Replicated first: if sharded over tokens at once, the lookup would send
        # tokens.
        x_BTD = constrain(self.embedding(tokens_BT), DATA, None, None)
        x_BTD = constrain_residual(x_BTD, self.config.sequence_parallel)
        if self.dropout is not None:
            x_BTD = self.dropout(x_BTD)
        return constrain_residual(x_BTD, self.config.sequence_parallel)

    @staticmethod
    def _by_row(table_RN: jax.Array, num_rows: int) -> jax.Array:
        # fp32: all blocks of a stack add to its gradient.
        wide = table_RN.astype(jnp.promote_types(table_RN.dtype, jnp.float32))
        by_row_BRN = jnp.broadcast_to(wide, (num_rows, *wide.shape))
        return constrain(by_row_BRN, DATA, None, TENSOR)


class T5Between(nnx.Module):
    """Normalise what the encoder returns, and begin the decoder.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.sequence_parallel = config.sequence_parallel
        self.final_norm = make_norm(config)
        self.dropout = make_dropout(config.dropout, rngs)

    def __call__(self, hidden: Hidden) -> Hidden:
        """Turn the encoder's hidden state into the decoder's."""
        memory_BSD = self.final_norm(hidden["x"])
        if self.dropout is not None:
            memory_BSD = self.dropout(memory_BSD)
        return {
            "x": hidden["target"],
            "memory": constrain_residual(memory_BSD, self.sequence_parallel),
            "decoder_bias": hidden["decoder_bias"],
        }


class T5Head(nnx.Module):
    """Normalise, and multiply by the head or by the transposed embedding table.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.final_norm = make_norm(config)
        self.dropout = make_dropout(config.dropout, rngs)
        width, vocab = config.width, config.vocab_size
        if config.tied_embedding:
            names = ("vocab", "embed")
            self.logits = Embedding((vocab, width), names, stddev=1.0, rngs=rngs)
        else:
            shape, stddev = (width, vocab), width**-0.5
            names = ("embed", "vocab")
            self.logits = Linear(shape, names, bias=False, stddev=stddev, rngs=rngs)

    def __call__(
        self,
        hidden: Hidden,
        *,
        targets_BT: Int[Array, "B T"] | None = None,
        weights_BT: Float[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"] | Float[Array, ""]:
        """Predict each token of the decoder, or sum the loss of known ones.

        Args:
          hidden: of the decoder, after its last block.
          targets_BT: the token to predict at each place.
          weights_BT: of each target; None for 1.

        Returns:
          Logits, fp32; with targets, the weighted sum of their cross entropies.
        """
        tokens = self.config.sequence_parallel
        x_BTD = self.final_norm(hidden["x"])
        if self.dropout is not None:
            x_BTD = self.dropout(x_BTD)
        x_BTD = gather_tokens(x_BTD, tokens)
        logits = self.logits
        if isinstance(logits, Embedding):
            x_BTD = x_BTD * jnp.asarray(self.config.width**-0.5, x_BTD.dtype)
            kernel_DV = logits.table[...].T
        else:
            kernel_DV = logits.kernel[...]
        if targets_BT is None:
            return project_to_logits(x_BTD, kernel_DV, flatten=not tokens)
        loss = cross_entropy(
            *(x_BTD, kernel_DV, targets_BT, weights_BT),
            logits_dtype=self.config.logits_dtype,
            tokens_axis=TENSOR if tokens else None,
        )
        return loss.total
