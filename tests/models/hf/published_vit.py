"""Small ViTs of Hugging Face's, at random, as the oracle of ours."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.models.hf.published import Published, gradients, moved

SIZES: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 7,
    "id2label": {number: f"class {number}" for number in range(7)},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "vit": SIZES,
    "vit-without-bias": {**SIZES, "qkv_bias": False, "hidden_act": "relu"},
    "vit-tanh": {**SIZES, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3},
}
_IN_FILES = (
    ("vit.layers.", "vit.encoder.layer."),
    ("attention.q_proj", "attention.attention.query"),
    ("attention.k_proj", "attention.attention.key"),
    ("attention.v_proj", "attention.attention.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
)
"""Parts of the names of their parameters -> those of the tensors in their files."""


def batch_of(config: Any) -> dict[str, np.ndarray]:
    """Images, channels last, and their labels."""
    rng = np.random.default_rng(0)
    shape = 4, config.image_size, config.image_size, config.num_channels
    labels = rng.integers(0, config.num_labels, 4, np.int32)
    return {"image": rng.normal(size=shape).astype(np.float32), "label": labels}


def publish(name: str, folder: Path) -> Published:
    """Make a ViT at random, save it, and run it."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**CONFIGS[name], attn_implementation="eager")
    model = transformers.ViTForImageClassification(config)
    moved(model).save_pretrained(folder)
    batch = batch_of(config)
    return Published(folder, batch, *run(model, batch))


def run(model: Any, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, float, dict]:
    """Logits, loss and gradients, those by the names of tensors in files."""
    pixels = torch.tensor(batch["image"].transpose(0, 3, 1, 2))
    logits = model.eval()(pixel_values=pixels).logits
    labels = torch.tensor(batch["label"], dtype=torch.long)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    found = gradients(model, loss)
    return logits.detach().numpy(), float(loss.detach()), _as_in_files(found)


def _as_in_files(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    named = {}
    for name, grad in found.items():
        for theirs, in_file in _IN_FILES:
            name = name.replace(theirs, in_file)
        named[name] = grad
    return named


def reload(folder: Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of a folder's model, loaded by them, who must miss nothing."""
    model, how = transformers.AutoModelForImageClassification.from_pretrained(
        folder,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not how["missing_keys"]
    assert not how["unexpected_keys"]
    return run(model, batch)[0]


def count(**fields: Any) -> int:
    """Parameters of a ViT of theirs, which is not made."""
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**fields))
    return sum(param.numel() for param in model.parameters())
