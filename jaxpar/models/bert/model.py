"""What is a BERT: an embedding, blocks that see whole rows, and a task's head."""

import functools

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.model.blocks import PipelineModel
from jaxpar.models.attention import Attention, Heads
from jaxpar.models.bert.config import BertConfig
from jaxpar.models.bert.embed import BertEmbed, make_bert_norm
from jaxpar.models.bert.head import BertHead
from jaxpar.models.block import TransformerBlock
from jaxpar.models.blocked_attention import Scoring
from jaxpar.models.mlp import MLP

_STDDEV = 0.02


def make_bert(config: BertConfig) -> PipelineModel:
    """Make an encoder with normalisation after each half of a block.

    ``model(tokens_BT)`` returns fp32 logits of the config's task
    (`jaxpar.models.bert.head.BertHead`). It takes by keyword token_types_BT (None for
    0), positions_BT (None for 0, 1, 2 and so on) and segment_ids_BT: tokens attend only
    to tokens of their own segment, and padding is a segment of its own.

    Parameters are fp32 and carry logical names (vocab, embed, heads, kv_heads, mlp,
    layers); the model computes in the dtype that they are cast to. Its only other state
    is dropout's keys and counts; with ``dropout=0`` it has none.

    Args:
      config: the shape of the model, and its task.

    Returns:
      The model, for ``jaxpar.initialize(model=...)`` on any mesh; `PipelineModel.init`
      makes one to call.

    Example:
      >>> import jax.numpy as jnp
      >>> shape = {"vocab_size": 96, "num_layers": 2, "num_heads": 2, "width": 16}
      >>> config = BertConfig(**shape, seq_len=8, task="sequence", num_labels=3)
      >>> tokens_BT = jnp.zeros((1, 8), int)
      >>> make_bert(config).init(0, tokens_BT)(tokens_BT).shape
      (1, 3)

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for
    Language Understanding" (2019).
    """
    tie = (("embed", "embedding/table"), ("head", "words/logits/table"))
    return PipelineModel(
        embed=functools.partial(BertEmbed, config),
        sections={"blocks": (functools.partial(BertBlock, config), config.num_layers)},
        head=functools.partial(BertHead, config),
        tied=(tie,) if config.predicts_words else (),
        remat=config.remat,
        remat_names=config.remat_names,
        unroll=config.unroll,
    )


class BertBlock(TransformerBlock):
    """Attention, then an MLP; the sum with the residual stream is normalised.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        attention = Attention(
            config.width,
            Heads(config.num_heads, config.num_heads, config.head_size),
            biases=("query", "key", "value", "output"),
            output_stddev=_STDDEV,
            flatten=not config.sequence_parallel,
            implementation=config.attention,
            pattern_len=config.seq_len,
            scoring=Scoring(causal=False),
            rngs=rngs,
        )
        mlp = MLP(
            config.width,
            config.hidden_width,
            activation=config.activation,
            bias=True,
            output_stddev=_STDDEV,
            flatten=not config.sequence_parallel,
            rngs=rngs,
        )
        super().__init__(
            attention,
            mlp,
            make_norm=functools.partial(make_bert_norm, config),
            norms="after_sum",
            dropout=config.dropout,
            sequence_parallel=config.sequence_parallel,
            rngs=rngs,
        )

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        segment_ids_BT: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Run the block.

        Args:
          x_BTD: residual stream.
          segment_ids_BT: tokens attend only to tokens of their own segment; None
            where each row is one segment.

        Returns:
          Residual stream.
        """
        return self.run(x_BTD, segment_ids_BT=segment_ids_BT)
