"""What does a T5 minimise: the cross entropy of what the decoder should write."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch

START = 0
"""The token that the decoder reads first, and in the place of padding."""

NOT_LEARNED = -100
"""A label that is not predicted."""

_SHAPED_AS = {
    "attention_mask": "inputs",
    "segment_ids": "inputs",
    "label_segment_ids": "labels",
}


def t5_loss(model: Callable[..., jax.Array], batch: Batch) -> Weighted:
    """Sum the cross entropy of the labels, in nats.

    The decoder reads the labels, one place later. The head computes the loss, a chunk
    of tokens at a time (`jaxpar.losses.cross_entropy`).

    Args:
      model: of `make_t5`.
      batch: "inputs" [B, S], what the encoder reads; "labels" [B, T], what the decoder
        writes, with -100 where nothing is learned. Padded inputs have an
        "attention_mask" [B, S], 1 for tokens and 0 for padding. Packed rows have
        "segment_ids" [B, S] and "label_segment_ids" [B, T] instead: 1, 2, ... for the
        examples of a row, 0 for padding.

    Returns:
      The weighted sum over labels and the sum of weights, fp32.

    Raises:
      ValueError: if "inputs" or "labels" is missing, an entry is not of its tokens'
        shape, segment ids are given for one side, or a mask with them.
    """
    _check(batch)
    labels_BT, segments_BT = batch["labels"], batch.get("label_segment_ids")
    is_learned_BT = labels_BT != NOT_LEARNED
    written_BT = jnp.where(is_learned_BT, labels_BT, START)
    keywords = {}
    is_first_BT = jnp.arange(labels_BT.shape[1])[None] == 0
    if segments_BT is not None:
        is_learned_BT &= segments_BT > 0
        is_first_BT |= segments_BT != jnp.roll(segments_BT, 1, axis=1)
        keywords["segment_ids_BS"] = batch["segment_ids"]
        keywords["decoder_segment_ids_BT"] = segments_BT
    elif "attention_mask" in batch:
        keywords["segment_ids_BS"] = batch["attention_mask"].astype(jnp.int32)
    read_BT = jnp.where(is_first_BT, START, jnp.roll(written_BT, 1, axis=1))
    weights_BT = is_learned_BT.astype(jnp.float32)
    known = {"targets_BT": written_BT, "weights_BT": weights_BT}
    total = model(batch["inputs"], read_BT, **known, **keywords)
    return Weighted(total, weights_BT.sum())


def _check(batch: Batch) -> None:
    for name in ("inputs", "labels"):
        if name not in batch:
            raise ValueError(
                f"batch: has {sorted(batch)}, but the loss reads 'inputs' [B, S] and "
                "'labels' [B, T]."
            )
    for name, tokens in _SHAPED_AS.items():
        if name in batch and batch[name].shape != batch[tokens].shape:
            raise ValueError(
                f"batch: {name!r} has shape {batch[name].shape}, but {tokens!r} "
                f"{batch[tokens].shape}; give one entry per token."
            )
    sides = [name for name in ("segment_ids", "label_segment_ids") if name in batch]
    if len(sides) == 1:
        raise ValueError(
            f"batch: has {sides[0]!r} alone; give packed rows 'segment_ids' and "
            "'label_segment_ids', and padded ones 'attention_mask'."
        )
    if sides and "attention_mask" in batch:
        raise ValueError(
            "batch: has 'attention_mask' and 'segment_ids'; leave the mask out, and "
            "give padding segment 0."
        )
