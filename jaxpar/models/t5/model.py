"""What is a T5: an encoder that reads, and a decoder that writes."""

import functools

from jaxpar.model.blocks import PipelineModel
from jaxpar.models.t5.blocks import T5DecoderBlock, T5EncoderBlock
from jaxpar.models.t5.config import T5Config
from jaxpar.models.t5.ends import T5Between, T5Embed, T5Head


def make_t5(config: T5Config) -> PipelineModel:
    """Make an encoder and a decoder, T5 1.1 or the first T5.

    ``model(tokens_BS, decoder_tokens_BT)`` returns fp32 logits [B, T, V]. It takes by
    keyword segment_ids_BS and decoder_segment_ids_BT: tokens attend only to tokens of
    their own segment, on both sides. A mask of padding is segment_ids_BS of 1 and 0.

    Parameters are fp32 and carry logical names (vocab, embed, heads, kv_heads, mlp,
    layers); the model computes in the dtype that they are cast to. Its only other state
    is dropout's keys and counts; with ``dropout=0`` it has none.

    Args:
      config: the shape of the model.

    Returns:
      The model, for ``jaxpar.initialize(model=...)`` on any mesh; `PipelineModel.init`
      makes one to call.

    Example:
      >>> import jax.numpy as jnp
      >>> config = T5Config(num_layers=2, num_heads=2, width=16)
      >>> read_BS, written_BT = jnp.zeros((1, 8), int), jnp.zeros((1, 3), int)
      >>> make_t5(config).init(0, read_BS, written_BT)(read_BS, written_BT).shape
      (1, 3, 512)

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
    Text-to-Text Transformer" (2020); Shazeer, "GLU Variants Improve Transformer"
    (2020), for 1.1. Differs: attention weights and features inside MLPs are not
    dropped.
    """
    tie = (("embed", "embedding/table"), ("head", "logits/table"))
    return PipelineModel(
        embed=functools.partial(T5Embed, config),
        sections={
            "encoder": (functools.partial(T5EncoderBlock, config), config.num_layers),
            "between": functools.partial(T5Between, config),
            "decoder": (
                functools.partial(T5DecoderBlock, config),
                config.decoder_layers,
            ),
        },
        head=functools.partial(T5Head, config),
        tied=(tie,) if config.tied_embedding else (),
        remat=config.remat,
        remat_names=config.remat_names,
        unroll=config.unroll,
    )
