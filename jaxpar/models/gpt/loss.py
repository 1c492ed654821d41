"""What does a GPT minimise: the cross entropy of each next token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch


def gpt_loss(model: Callable[..., jax.Array], batch: Batch) -> Weighted:
    """Sum the next-token cross entropy, in nats.

    The label's logit is selected by comparison and sum: elementwise work that fuses
    with the pass over the logits, also on a sharded vocabulary. The gradient of a
    gather would be a scatter into an array of the logits' size.

    Args:
      model: maps tokens [B, T] to logits [B, T, V].
      batch: "tokens", [B, T + 1] integers, and optionally "weights", [B, T]: the weight
        of predicting tokens[:, t + 1].

    Returns:
      The weighted sum over targets and the sum of weights, fp32.

    Raises:
      ValueError: if "tokens" is missing, or "weights" does not have one entry per
        target.

    Example:
      >>> uniform = lambda tokens_BT: jnp.zeros((*tokens_BT.shape, 256))
      >>> loss = gpt_loss(uniform, {"tokens": jnp.zeros((2, 5), int)})
      >>> float(loss.weight)
      8.0
    """
    if "tokens" not in batch:
        raise ValueError(
            f"batch: has {sorted(batch)}, but gpt_loss reads 'tokens' [B, T + 1] and, "
            "if given, 'weights' [B, T]."
        )
    inputs_BT, targets_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    weights_BT = batch.get("weights")
    if weights_BT is None:
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
    if weights_BT.shape != targets_BT.shape:
        raise ValueError(
            f"batch: 'weights' has shape {weights_BT.shape}, but 'tokens' "
            f"{batch['tokens'].shape} gives targets of shape {targets_BT.shape}; give "
            "one weight per target."
        )
    logits_BTV = model(inputs_BT).astype(jnp.float32)
    numbers_V = jnp.arange(logits_BTV.shape[-1])
    is_target_BTV = numbers_V == targets_BT[..., None]
    target_logits_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT
    weights_BT = weights_BT.astype(jnp.float32)
    return Weighted((losses_BT * weights_BT).sum(), weights_BT.sum())
