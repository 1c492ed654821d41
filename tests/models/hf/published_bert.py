"""Small BERTs of Hugging Face's, at random, as the oracle of ours."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxpar.models import pretraining_batch
from tests.models.hf.published import Published, gradients, moved

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "num_labels": 5,
}
KINDS: dict[str, tuple[str, str]] = {
    "pretraining": ("BertForPreTraining", "AutoModelForPreTraining"),
    "masked": ("BertForMaskedLM", "AutoModelForMaskedLM"),
    "sequence": (
        "BertForSequenceClassification",
        "AutoModelForSequenceClassification",
    ),
    "tokens": ("BertForTokenClassification", "AutoModelForTokenClassification"),
}
"""Task -> their class, and what loads it."""

ROWS, LENGTH = 4, 24


def batch_of(task: str, *, padded: bool) -> dict[str, Any]:
    """A batch of ours; no token is their padding token, whose row has no gradient."""
    rng, shape = np.random.default_rng(0), (ROWS, LENGTH)
    kept = np.arange(LENGTH) < np.array([[LENGTH], [19], [12], [23]])
    kept = kept if padded else np.ones(shape, bool)
    classes = 5 if task == "tokens" else SIZES["vocab_size"]
    is_label = (rng.random(shape) < 0.3) & kept
    labels = np.where(is_label, rng.integers(0, classes, shape), -100)
    batch: dict[str, Any] = {
        "tokens": np.where(kept, rng.integers(1, 96, shape), 0),
        "token_types": (np.arange(LENGTH) > np.array([[9], [4], [7], [23]])) * 1,
    }
    if padded:
        batch["attention_mask"] = kept * 1
    if task == "sequence":
        batch["label"] = np.array([4, 0, 1, 3])
    else:
        batch["labels"] = labels
    if task == "pretraining":
        batch["next_sentence"] = np.array([0, 1, 1, 0])
    batch = {name: array.astype(np.int32) for name, array in batch.items()}
    return pretraining_batch(batch) if task == "pretraining" else batch


def publish(task: str, folder: Path, *, padded: bool = False, **fields: Any) -> Any:
    """Make a model at random, save it, and run it."""
    torch.manual_seed(0)
    how = {"attn_implementation": "eager"}
    config = transformers.BertConfig(**{**SIZES, **fields}, **how)
    model = moved(getattr(transformers, KINDS[task][0])(config))
    model.save_pretrained(folder)
    batch = batch_of(task, padded=padded)
    return Published(folder, batch, *run(task, model, batch))


def run(task: str, model: Any, batch: dict[str, Any]) -> tuple[Any, float, dict]:
    """Logits, loss and gradients; of pre-training the logits of both, side by side."""
    model.eval()
    named = {
        "tokens": "input_ids",
        "token_types": "token_type_ids",
        "attention_mask": "attention_mask",
        "labels": "labels",
        "label": "labels",
        "next_sentence": "next_sentence_label",
    }
    given = {
        named[name]: torch.tensor(array, dtype=torch.long)
        for name, array in batch.items()
        if name in named
    }
    out = model(**given)
    logits = (
        [out.prediction_logits, out.seq_relationship_logits]
        if task == "pretraining"
        else [out.logits]
    )
    arrays = [logit.detach().numpy() for logit in logits]
    found = joined(arrays, batch)
    return found, float(out.loss.detach()), gradients(model, out.loss)


def joined(logits: Any, batch: dict[str, Any]) -> Any:
    """Logits of both kinds as one array, those of padding zero."""
    words, *rest = logits
    if words.ndim == 3 and "attention_mask" in batch:
        words = words * batch["attention_mask"][..., None]
    parts = [words, *rest]
    return np.concatenate([np.asarray(part).ravel() for part in parts])


def reload(task: str, folder: Path, batch: dict[str, Any]) -> np.ndarray:
    """The logits of a folder's model, loaded by them."""
    auto = getattr(transformers, KINDS[task][1])
    model = auto.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return run(task, model, batch)[0]
