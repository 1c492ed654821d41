"""What does a GPT minimise: the cross entropy of each next token."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch

_PER_TOKEN = {"segment_ids": "segment_ids_BT", "positions": "positions_BT"}
"""Entries of a packed batch -> the model's keywords."""


def gpt_loss(model: Callable[..., jax.Array], batch: Batch) -> Weighted:
    """Sum the next-token cross entropy, in nats.

    The label's logit is selected by comparison and sum: elementwise work that fuses
    with the pass over the logits, also on a sharded vocabulary. The gradient of a
    gather would be a scatter into an array of the logits' size.

    Args:
      model: maps tokens [B, T] to logits [B, T, V].
      batch: "tokens", [B, T + 1] integers, and optionally "weights", [B, T]: the weight
        of predicting tokens[:, t + 1]. With "segment_ids" and "positions", [B, T + 1],
        as `jaxpar.data.PackedDocuments` gives them, tokens attend only to tokens of
        their own segment, and predict none of another; segment 0 is padding.

    Returns:
      The weighted sum over targets and the sum of weights, fp32.

    Raises:
      ValueError: if "tokens" is missing, "weights" does not have one entry per target,
        or "segment_ids" or "positions" not one per token.

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
    segments, weights_BT = _segments(batch), _weights(batch)
    logits_BTV = model(inputs_BT, **segments).astype(jnp.float32)
    numbers_V = jnp.arange(logits_BTV.shape[-1])
    is_target_BTV = numbers_V == targets_BT[..., None]
    target_logits_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT
    return Weighted((losses_BT * weights_BT).sum(), weights_BT.sum())


def _weights(batch: Batch) -> jax.Array:
    """The weight of each target; 0 where it is not of the segment that predicts it."""
    targets_BT = batch["tokens"][:, 1:]
    weights_BT = batch.get("weights")
    if weights_BT is None:
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
    if weights_BT.shape != targets_BT.shape:
        raise ValueError(
            f"batch: 'weights' has shape {weights_BT.shape}, but 'tokens' "
            f"{batch['tokens'].shape} gives targets of shape {targets_BT.shape}; give "
            "one weight per target."
        )
    weights_BT = weights_BT.astype(jnp.float32)
    segment_ids = batch.get("segment_ids")
    if segment_ids is None:
        return weights_BT
    is_own_BT = (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, 1:] > 0)
    return weights_BT * is_own_BT


def _segments(batch: Batch) -> dict[str, jax.Array]:
    """What the model takes by keyword of a packed batch; nothing of another."""
    given = {name: batch[name] for name in _PER_TOKEN if name in batch}
    for name, array in given.items():
        if array.shape != batch["tokens"].shape:
            raise ValueError(
                f"batch: {name!r} has shape {array.shape}, but 'tokens' "
                f"{batch['tokens'].shape}; give one entry per token."
            )
    return {_PER_TOKEN[name]: array[:, :-1] for name, array in given.items()}
