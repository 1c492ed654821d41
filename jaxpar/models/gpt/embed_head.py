"""What comes before and after a GPT's blocks: the embedding, and the logits.

Functions of a module that holds the parameters: `jaxpar.models.GPT` itself, or the
embedding and head modules of a pipeline.
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.mesh import DATA, TENSOR
from jaxpar.models.gpt.config import GPTConfig
from jaxpar.models.layers import Embedding, LayerNorm, RMSNorm, project_to_logits
from jaxpar.sharding.constrain import constrain


def make_norm(config: GPTConfig) -> LayerNorm | RMSNorm:
    """Make the normalisation that a config names."""
    if config.norm == "layernorm":
        return LayerNorm(config.width, bias=config.bias)
    return RMSNorm(config.width)


def make_dropout(config: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout | None:
    """Make dropout; None if its rate is 0."""
    return nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None


def make_embeddings(
    config: GPTConfig, rngs: nnx.Rngs
) -> tuple[Embedding, Embedding | None]:
    """Make the table of tokens, and that of positions where they are learned."""
    width = config.width
    tokens = Embedding((config.vocab_size, width), ("vocab", "embed"), rngs=rngs)
    if config.positions != "learned":
        return tokens, None
    return tokens, Embedding((config.seq_len, width), (None, "embed"), rngs=rngs)


def embed(
    module: Any,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "#B T"] | None,
) -> Float[Array, "B T D"]:
    """Look tokens up, add learned positions, drop.

    Args:
      module: holds config, embedding, positions and dropout.
      tokens_BT: token numbers.
      positions_BT: position of each token; None for 0, 1, 2 and so on.

    Returns:
      The residual stream before the first block.

    Raises:
      ValueError: if T exceeds the number of learned positions.
    """
    config = module.config
    # Replicated first: if sharded over tokens at once, the lookup would send tokens.
    x_BTD = constrain(module.embedding(tokens_BT), DATA, None, None)
    x_BTD = constrain_residual(x_BTD, config)
    if module.positions is not None:
        length = tokens_BT.shape[1]
        if positions_BT is not None:
            x_BTD = x_BTD + module.positions(positions_BT)
        elif length <= config.seq_len:
            x_BTD = x_BTD + module.positions.table[:length]
        else:
            raise ValueError(
                f"tokens_BT: a row of {length} tokens is longer than the "
                f"{config.seq_len} learned positions (GPTConfig.seq_len); "
                "cut the rows, raise seq_len, or use positions='rotary'."
            )
    if module.dropout is not None:
        x_BTD = module.dropout(x_BTD)
    return constrain_residual(x_BTD, config)


def logits_of(
    hidden_BTD: Float[Array, "B T D"], kernel_DV: Float[Array, "D V"], config: GPTConfig
) -> Float[Array, "B T V"]:
    """Multiply by the head, or by the transposed embedding table if they are tied."""
    flatten = not config.sequence_parallel
    return project_to_logits(hidden_BTD, kernel_DV, flatten=flatten)


def constrain_residual(x_BTD: jax.Array, config: GPTConfig) -> jax.Array:
    """Constrain the residual stream between the halves of a block."""
    tokens_axis = TENSOR if config.sequence_parallel else None
    return constrain(x_BTD, DATA, tokens_axis, None)


def gather_tokens(y_BTD: jax.Array, config: GPTConfig) -> jax.Array:
    """Undo sequence parallelism after a norm: its users share the one gather."""
    # Constrained twice, or the compiler gathers before the norm's last step, in fp32.
    return constrain(constrain_residual(y_BTD, config), DATA, None, None)
