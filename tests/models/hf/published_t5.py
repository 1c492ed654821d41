"""Small T5 of Hugging Face's, at random, as the oracle of ours."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.models.hf.published import Published, gradients, moved

SIZES = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "1.1": {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "first": {**SIZES, "feed_forward_proj": "relu"},
}


def batch_of(vocab: int) -> dict[str, np.ndarray]:
    """Padded inputs, and labels of several lengths."""
    rng = np.random.default_rng(0)
    mask = (np.arange(24) < np.array([24, 17, 9, 20])[:, None]).astype(np.int32)
    labels = rng.integers(1, vocab, (4, 13)).astype(np.int32)
    labels[np.arange(13) >= np.array([13, 5, 9, 12])[:, None]] = -100
    inputs = rng.integers(1, vocab, (4, 24)).astype(np.int32) * mask
    return {"inputs": inputs, "attention_mask": mask, "labels": labels}


def publish(name: str, folder: Path) -> Published:
    """Make a model at random, save it, and run it."""
    fields = CONFIGS[name]
    torch.manual_seed(0)
    config = transformers.T5Config(**fields)
    model = transformers.T5ForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    if fields.get("tie_word_embeddings") is False:
        # Version 5 ties what it makes, and reads published heads as they are.
        drawn = 32**-0.5 * torch.randn(model.lm_head.weight.shape)
        model.lm_head.weight = torch.nn.Parameter(drawn)
    moved(model).save_pretrained(folder)
    batch = batch_of(config.vocab_size)
    logits, loss = run(model, batch)
    found = logits.detach().numpy(), float(loss.detach()), gradients(model, loss)
    return Published(folder, batch, *found)


def run(model: Any, batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and loss."""
    given = {name: torch.tensor(x, dtype=torch.long) for name, x in batch.items()}
    out = model.eval()(
        input_ids=given["inputs"],
        attention_mask=given["attention_mask"],
        labels=given["labels"],
        use_cache=False,
    )
    return out.logits, out.loss


def reload(folder: Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of a folder's model, loaded by them."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return run(model, batch)[0].detach().numpy()
