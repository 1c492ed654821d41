"""What comes before a BERT's blocks: words, positions and types, normalised."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA
from jaxpar.models.bert.config import BertConfig
from jaxpar.models.block import constrain_residual, make_dropout
from jaxpar.models.layers import Embedding, add_to_rows
from jaxpar.models.norms import LayerNorm
from jaxpar.sharding.constrain import constrain


def make_bert_norm(config: BertConfig) -> LayerNorm:
    """Make one of a BERT's norms."""
    return LayerNorm(config.width, epsilon=config.norm_epsilon)


class BertEmbed(nnx.Module):
    """Add up the embeddings of words, positions and types; normalise; drop.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config, width = config, config.width
        words = (config.vocab_size, width)
        self.embedding = Embedding(words, ("vocab", "embed"), rngs=rngs)
        self.positions = Embedding((config.seq_len, width), (None, "embed"), rngs=rngs)
        types = (config.type_vocab_size, width)
        self.types = Embedding(types, (None, "embed"), rngs=rngs)
        self.norm = make_bert_norm(config)
        self.dropout = make_dropout(config.dropout, rngs)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        *,
        token_types_BT: Int[Array, "B T"] | None = None,
        positions_BT: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Embed tokens.

        Args:
          tokens_BT: words, from 0 to vocab_size - 1.
          token_types_BT: type of each token; None for 0.
          positions_BT: position of each token; None for 0, 1, 2 and so on.

        Returns:
          The residual stream before the first block.

        Raises:
          ValueError: if T exceeds the number of learned positions.
        """
        tokens = self.config.sequence_parallel
        # Replicated first: if sharded over tokens at once, the lookup would send
        # tokens.
        x_BTD = constrain(self.embedding(tokens_BT), DATA, None, None)
        x_BTD = constrain_residual(x_BTD, tokens)
        x_BTD = self._with_types(x_BTD, token_types_BT)
        x_BTD = self.norm(self._with_positions(x_BTD, positions_BT))
        if self.dropout is not None:
            x_BTD = self.dropout(x_BTD)
        return constrain_residual(x_BTD, tokens)

    def _with_types(
        self, x_BTD: jax.Array, token_types_BT: jax.Array | None
    ) -> jax.Array:
        if token_types_BT is not None:
            return x_BTD + self.types(token_types_BT)
        first_TD = self.types.table[:1].repeat(x_BTD.shape[1], axis=0)
        return add_to_rows(x_BTD, first_TD)

    def _with_positions(
        self, x_BTD: jax.Array, positions_BT: jax.Array | None
    ) -> jax.Array:
        if positions_BT is not None:
            return x_BTD + self.positions(positions_BT)
        length, most = x_BTD.shape[1], self.config.seq_len
        if length > most:
            raise ValueError(
                f"tokens_BT: a row of {length} tokens is longer than the {most} "
                "learned positions (BertConfig.seq_len); cut the rows, or raise "
                "seq_len."
            )
        return add_to_rows(x_BTD, self.positions.table[:length])
