"""What does a BERT minimise, and what does its batch hold?

Masked words and the order of sentences are two means, over places and over rows. A
`jaxpar.Weighted` is divided once, by one weight over the global batch. So the second
mean's sum is multiplied by words per sentence of the global batch: a number that the
host counts (`pretraining_batch`), as a loss function sees only its shard of a
micro-batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.losses.logits import in_two_passes, is_target_of
from jaxpar.models.bert.config import BertConfig
from jaxpar.step.inputs import Replicated
from jaxpar.step.weighted import Weighted
from jaxpar.types import Batch

RATIO = "words_per_sentence"
"""Entry of a batch of the task "pretraining": a `jaxpar.Replicated` scalar."""

_KEYWORDS = {
    "token_types": "token_types_BT",
    "positions": "positions_BT",
    "segment_ids": "segment_ids_BT",
}
"""Entries of a batch, one a token -> a model's keywords."""

Model = Callable[..., Any]
Found = tuple[Weighted, dict[str, Weighted]]


def make_bert_loss(config: BertConfig) -> Callable[[Model, Batch], Any]:
    """Choose the loss of a config's task.

    Every batch has "tokens" [B, T], and may have "token_types" [B, T], "positions"
    [B, T], and "segment_ids" [B, T], where 0 is padding, or "attention_mask" [B, T],
    where 0 is padding and all else one segment. A negative label is none.

    Args:
      config: of the model.

    Returns:
      `masked_word_loss`, `pretraining_loss`, `row_class_loss` or `token_class_loss`.
    """
    losses = {
        "masked": masked_word_loss,
        "pretraining": pretraining_loss,
        "sequence": row_class_loss,
        "tokens": token_class_loss,
    }
    return losses[config.task]


def masked_word_loss(model: Model, batch: Batch) -> Weighted:
    """Sum the cross entropy of masked words, in nats.

    The head computes it, a chunk of tokens at a time, so that logits are never held
    whole (`jaxpar.losses.cross_entropy`).

    Args:
      model: of `make_bert`, for the task "masked".
      batch: as `make_bert_loss` says, with "labels" [B, T], the word to predict at
        each place, and optionally "weights" [B, T]. Padding is not predicted.

    Returns:
      The weighted sum over labels and the sum of weights, fp32.

    Raises:
      ValueError: if an entry is missing or of another shape.
    """
    tokens_BT, keywords = _inputs(batch)
    labels_BT, weights_BT = _labels(batch), word_weights(batch)
    total = model(tokens_BT, labels_BT=labels_BT, weights_BT=weights_BT, **keywords)
    return Weighted(total, weights_BT.sum())


def masked_word_accuracy(model: Model, batch: Batch) -> Found:
    """As `masked_word_loss`, from logits that are held whole, with the share of hits.

    For evaluation: ``jaxpar.initialize(eval_fn=masked_word_accuracy)``.

    Args:
      model: of `make_bert`, for the task "masked".
      batch: as `masked_word_loss` takes it.

    Returns:
      The loss, and its metric "accuracy".
    """
    tokens_BT, keywords = _inputs(batch)
    logits_BTV = model(tokens_BT, **keywords)
    return _classified(logits_BTV, _labels(batch), word_weights(batch))


def pretraining_loss(model: Model, batch: Batch) -> Found:
    """Add the mean over masked words and the mean over pairs of sentences.

    Args:
      model: of `make_bert`, for the task "pretraining".
      batch: as `masked_word_loss` takes it, with "next_sentence" [B], 0 where the
        second sentence follows the first and 1 where it does not, and what
        `pretraining_batch` adds.

    Returns:
      The two means as one loss, exact on every mesh, and its metrics "word_loss" and
      "sentence_loss".

    Raises:
      ValueError: if an entry is missing or of another shape.
    """
    tokens_BT, keywords = _inputs(batch)
    _require(batch, "next_sentence", (tokens_BT.shape[0],))
    if RATIO not in batch:
        raise ValueError(
            f"batch: has no {RATIO!r}, the masked words of the global batch for each "
            "pair of sentences, by which two means become one loss; step on "
            "jaxpar.models.pretraining_batch(batch), which counts them."
        )
    labels_BT, weights_BT = _labels(batch), word_weights(batch)
    words, logits_B2 = model(
        tokens_BT, labels_BT=labels_BT, weights_BT=weights_BT, **keywords
    )
    next_B = batch["next_sentence"]
    weights_B = _is_label(next_B)
    losses_B = _losses(logits_B2, next_B)
    sentences, num_words = (losses_B * weights_B).sum(), weights_BT.sum()
    loss = Weighted(words + batch[RATIO] * sentences, num_words)
    return loss, {
        "word_loss": Weighted(words, num_words),
        "sentence_loss": Weighted(sentences, weights_B.sum()),
    }


def row_class_loss(model: Model, batch: Batch) -> Found:
    """Average the cross entropy of rows' classes.

    Args:
      model: of `make_bert`, for the task "sequence".
      batch: as `make_bert_loss` says, with "label" [B], from 0 to num_labels - 1.

    Returns:
      The loss, and its metric "accuracy".

    Raises:
      ValueError: if an entry is missing or of another shape.
    """
    tokens_BT, keywords = _inputs(batch)
    _require(batch, "label", (tokens_BT.shape[0],))
    label_B = batch["label"]
    return _classified(model(tokens_BT, **keywords), label_B, _is_label(label_B))


def token_class_loss(model: Model, batch: Batch) -> Found:
    """Average the cross entropy of tokens' classes.

    Args:
      model: of `make_bert`, for the task "tokens".
      batch: as `make_bert_loss` says, with "labels" [B, T], from 0 to num_labels - 1,
        and optionally "weights" [B, T]. Padding is not classified.

    Returns:
      The loss, and its metric "accuracy".

    Raises:
      ValueError: if an entry is missing or of another shape.
    """
    tokens_BT, keywords = _inputs(batch)
    weights_BT = word_weights(batch)
    logits_BTC = model(tokens_BT, **keywords)
    return _classified(logits_BTC, batch["labels"], weights_BT)


def pretraining_batch(batch: Batch) -> Batch:
    """Count words per sentence in a global batch, for `pretraining_loss`.

    Args:
      batch: NumPy arrays, this process's rows. All processes call it together.

    Returns:
      The batch with "words_per_sentence", the same on every process.

    Raises:
      ValueError: if an entry is missing or of another shape.

    Example:
      >>> labels, follows = np.array([[4, -1, 7], [-1, 2, -1]]), np.array([0, 1])
      >>> batch = {"tokens": labels * 0, "labels": labels, "next_sentence": follows}
      >>> float(pretraining_batch(batch)["words_per_sentence"].value)
      1.5
    """
    rows = batch["tokens"].shape[0] if "tokens" in batch else 0
    _require(batch, "next_sentence", (rows,))
    sums = word_weights(batch).sum(), _is_label(batch["next_sentence"]).sum()
    counts = np.array(sums, np.float64)
    if jax.process_count() > 1:
        counts = np.asarray(multihost_utils.process_allgather(counts)).sum(0)
    ratio = np.float32(counts[0] / max(counts[1], 1))
    return {**batch, RATIO: Replicated(ratio)}


def word_weights(batch: Batch) -> Any:
    """The weight of each label, fp32 [B, T]; 0 where there is none, and for padding.

    Args:
      batch: as `masked_word_loss` takes it.

    Raises:
      ValueError: if an entry is missing or of another shape.
    """
    shape = _tokens(batch).shape
    _require(batch, "labels", shape)
    weights_BT = _is_label(batch["labels"])
    for name in ("weights", "segment_ids", "attention_mask"):
        if name in batch:
            _require(batch, name, shape)
            own = batch[name] if name == "weights" else batch[name] != 0
            weights_BT = weights_BT * own.astype(np.float32)
    return weights_BT


def _inputs(batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The tokens, and the keywords of the model."""
    tokens_BT = _tokens(batch)
    given = {name: batch[name] for name in _KEYWORDS if name in batch}
    if "attention_mask" in batch:
        if "segment_ids" in given:
            raise ValueError(
                "batch: 'attention_mask' and 'segment_ids' both say which tokens see "
                "each other; give the latter alone, with 0 for padding."
            )
        # Padding is a segment of its own: words don't see it, and it sees itself.
        _require(batch, "attention_mask", tokens_BT.shape)
        given["segment_ids"] = (batch["attention_mask"] != 0).astype(np.int32)
    for name, array in given.items():
        _require({name: array}, name, tokens_BT.shape)
    return tokens_BT, {_KEYWORDS[name]: array for name, array in given.items()}


def _tokens(batch: Batch) -> Any:
    if "tokens" not in batch:
        raise ValueError(
            f"batch: has {sorted(batch)}, but a BERT reads 'tokens' [B, T]."
        )
    return batch["tokens"]


def _require(batch: Batch, name: str, shape: tuple[int, ...]) -> None:
    if name not in batch:
        raise ValueError(f"batch: has {sorted(batch)}, but the loss reads {name!r}.")
    if batch[name].shape != shape:
        raise ValueError(
            f"batch: {name!r} has shape {batch[name].shape}, but must have {shape}: "
            f"one entry per {'row' if len(shape) == 1 else 'token'} of 'tokens'."
        )


def _labels(batch: Batch) -> jax.Array:
    """Labels that are words, with any word where there is none."""
    _require(batch, "labels", _tokens(batch).shape)
    return jnp.maximum(batch["labels"], 0)


def _is_label(labels: Any) -> Any:
    return (labels >= 0).astype(np.float32)


def _losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross entropy of each label, or of class 0 where there is none."""
    found = in_two_passes(logits, is_target_of(logits, jnp.maximum(labels, 0)))
    return found.norm - found.target


def _classified(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Found:
    loss = Weighted((_losses(logits, labels) * weights).sum(), weights.sum())
    hits = (logits.argmax(-1) == labels) * weights
    return loss, {"accuracy": Weighted(hits.sum(), weights.sum())}
