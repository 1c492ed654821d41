"""What passes through blocks, of which some have experts?"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.models.block import TransformerBlock
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.experts.layer import Experts
from jaxpar.models.experts.routing import RouterStatistics

Hidden = jax.Array | dict[str, jax.Array]
"""The residual stream, [B, T, D]. Of a model with experts a dict: "x" is that, and
"router", [B, 4], the sum over blocks of their `RouterStatistics`, the same in each row.
"""


class RouterLosses(NamedTuple):
    """What routers add to a loss, and how they use the experts.

    Attributes:
      loss: the load-balance and z losses by their factors, a mean over the blocks.
      metrics: those losses, the largest load of an expert in units of the mean, and
        the share of choices that were dropped.
    """

    loss: Float[Array, ""]
    metrics: dict[str, Float[Array, ""]]


def begin(x_BTD: Float[Array, "B T D"], experts: ExpertsConfig) -> Hidden:
    """What enters the first block.

    Args:
      x_BTD: the residual stream.
      experts: of the model; with none, the stream is all.
    """
    if not experts.num:
        return x_BTD
    statistics = jnp.zeros((x_BTD.shape[0], len(RouterStatistics._fields)))
    return {"x": x_BTD, "router": statistics}


def stream_of(hidden: Hidden) -> Float[Array, "B T D"]:
    """The residual stream alone."""
    return hidden["x"] if isinstance(hidden, dict) else hidden


def run_block(
    block: TransformerBlock,
    hidden: Hidden,
    *,
    is_token_BT: Bool[Array, "B T"] | None = None,
    **how: Any,
) -> Hidden:
    """Run a block, whose MLP may be experts.

    Args:
      block: its `mlp` says which.
      hidden: as it comes from the block before.
      is_token_BT: False for padding, which goes to no expert; None for all True.
      **how: keywords of the block's attention.

    Returns:
      As `hidden`, with this block's statistics added.
    """
    if not isinstance(hidden, dict):
        return block.run(hidden, **how)
    if not isinstance(block.mlp, Experts):
        return {**hidden, "x": block.run(hidden["x"], **how)}
    found: list[RouterStatistics] = []

    def experts(y_BTD: jax.Array) -> jax.Array:
        update_BTD, own = block.mlp(y_BTD, is_token_BT)
        found.append(own)
        return update_BTD

    x_BTD = block.run_mlp(block.run_attention(hidden["x"], **how), experts)
    router = hidden["router"] + jnp.stack(found[0]).astype(jnp.float32)
    return {"x": x_BTD, "router": router}


def router_losses(
    hidden: Hidden, experts: ExpertsConfig, num_layers: int
) -> RouterLosses | None:
    """What the routers of all blocks add to the loss.

    Args:
      hidden: as it comes from the last block.
      experts: of the model.
      num_layers: blocks that have them.

    Returns:
      The losses and metrics; None for a model without experts.
    """
    if not isinstance(hidden, dict):
        return None
    own = RouterStatistics(*hidden["router"].mean(0) / num_layers)
    metrics = {
        "router_balance": own.balance,
        "router_z": own.router_z,
        "largest_expert_load": own.largest_load,
        "dropped_tokens": own.dropped,
    }
    loss = experts.balance_loss * own.balance + experts.router_z_loss * own.router_z
    return RouterLosses(loss, metrics)
