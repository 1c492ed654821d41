"""How does a batch of tokens become inputs, targets and a loss?"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.losses.logits import in_two_passes, is_target_of
from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch

_PER_TOKEN = {"segment_ids": "segment_ids_BT", "positions": "positions_BT"}
"""Entries of a packed batch -> a model's keywords."""
_MASK = "attention_mask"


def next_token_loss(model: Callable[..., jax.Array], batch: Batch) -> Weighted:
    """Sum the cross entropy of each next token, for a model that returns logits.

    Logits are held whole, in fp32: `cross_entropy` takes less memory, in a model that
    calls it in the place of its head.

    Args:
      model: maps tokens [B, T] to logits [B, T, V].
      batch: as `read_targets` takes it.

    Returns:
      The weighted sum over targets and the sum of weights, fp32.

    Example:
      >>> uniform = lambda tokens_BT: jnp.zeros((*tokens_BT.shape, 256))
      >>> loss = next_token_loss(uniform, {"tokens": jnp.zeros((2, 5), int)})
      >>> float(loss.weight)
      8.0
    """
    inputs_BT, targets_BT, weights_BT, keywords = read_targets(batch)
    logits_BTV = model(inputs_BT, **keywords).astype(jnp.float32)
    found = in_two_passes(logits_BTV, is_target_of(logits_BTV, targets_BT))
    total = ((found.norm - found.target) * weights_BT).sum()
    return Weighted(total, weights_BT.sum())


def read_targets(
    batch: Batch,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """Take a batch of tokens apart.

    Args:
      batch: "tokens", [B, T + 1] integers, and optionally "weights", [B, T]: the weight
        of predicting tokens[:, t + 1]. With "segment_ids" and "positions", [B, T + 1],
        as `jaxpar.data.PackedDocuments` gives them, tokens attend only to tokens of
        their own segment, and predict none of another; segment 0 is padding. Rows that
        are padded on either side may have "attention_mask" instead, [B, T + 1], 0 for
        padding: positions count the tokens.

    Returns:
      (inputs [B, T]; targets [B, T]; weights [B, T], fp32; the model's keywords
      segment_ids_BT and positions_BT, of a packed or padded batch).

    Raises:
      ValueError: if "tokens" is missing, "weights" does not have one entry per target,
        "segment_ids", "positions" or "attention_mask" not one per token, or there is
        a mask beside segments.
    """
    if "tokens" not in batch:
        raise ValueError(
            f"batch: has {sorted(batch)}, but the loss reads 'tokens' [B, T + 1] and, "
            "if given, 'weights' [B, T]."
        )
    batch = _with_segments(batch)
    keywords, weights_BT = _segments(batch), _weights(batch)
    return batch["tokens"][:, :-1], batch["tokens"][:, 1:], weights_BT, keywords


def _with_segments(batch: Batch) -> Batch:
    """A padded batch as a packed one of one segment a row."""
    if _MASK not in batch:
        return batch
    both = [name for name in _PER_TOKEN if name in batch]
    if both:
        raise ValueError(
            f"batch: {_MASK!r} and {both[0]!r} both say which tokens belong together; "
            "leave the mask out, and make segment 0 the padding."
        )
    _require_per_token(batch, _MASK)
    is_token_BT = (batch[_MASK] != 0).astype(jnp.int32)
    positions_BT = jnp.maximum(is_token_BT.cumsum(1) - 1, 0)
    return {**batch, "segment_ids": is_token_BT, "positions": positions_BT}


def _require_per_token(batch: Batch, name: str) -> None:
    shape, tokens = batch[name].shape, batch["tokens"].shape
    if shape != tokens:
        raise ValueError(
            f"batch: {name!r} has shape {shape}, but 'tokens' {tokens}; give one entry "
            "per token."
        )


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
    given = [name for name in _PER_TOKEN if name in batch]
    for name in given:
        _require_per_token(batch, name)
    return {_PER_TOKEN[name]: batch[name][:, :-1] for name in given}
