"""Models of `transformers` and timm, of one size: what the families' twins are.

Both contestants of a family are of these; ours is read from the folder that is written.
"""

import dataclasses
from typing import Any

import numpy as np

WIDTH, LAYERS, HEADS, VOCAB, LENGTH, BATCH = 256, 4, 8, 8192, 128, 8
STEPS = 8
"""Batches that there are."""

_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 688,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}
_ENCODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Twin:
    """A family's model.

    Attributes:
      kind: of its batches: "tokens", "masked", "spans" or "images".
      name: in `transformers`, as of `torch_model.py`; none for timm's.
      fields: of its config.
    """

    kind: str
    name: str
    fields: dict[str, Any]


def _decoder(name: str, **fields: Any) -> Twin:
    own = {**_DECODER, **fields}
    return Twin("tokens", name, own)


TWINS = {
    "gpt2": Twin(
        "tokens",
        "GPT2",
        {
            **{"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": WIDTH},
            **{"n_layer": LAYERS, "n_head": HEADS, "resid_pdrop": 0.0},
            **{"embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
    ),
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=32),
    "qwen3": _decoder("Qwen3", head_dim=WIDTH // HEADS),
    "gemma2": _decoder("Gemma2", head_dim=WIDTH // HEADS, sliding_window=32),
    "mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "bert": Twin(
        "masked",
        "Bert",
        {**_ENCODER, "vocab_size": VOCAB, "max_position_embeddings": LENGTH},
    ),
    "t5": Twin(
        "spans",
        "T5",
        {
            **{"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": WIDTH // HEADS},
            **{"d_ff": 640, "num_layers": LAYERS, "num_heads": HEADS},
            **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
        },
    ),
    "vit": Twin(
        "images",
        "ViT",
        {**_ENCODER, "image_size": 64, "patch_size": 8, "num_labels": 100},
    ),
    "coatnet": Twin("images", "", {}),
}


def batches(name: str) -> list[dict[str, np.ndarray]]:
    """The batches of a family, channels of images last, the same for both."""
    kind, rng = TWINS[name].kind, np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        if kind == "images":
            image = rng.normal(size=(BATCH, 64, 64, 3)).astype(np.float32)
            label = rng.integers(0, 100, BATCH).astype(np.int32)
            found.append({"image": image, "label": label})
            continue
        extra = kind == "tokens"
        tokens = rng.integers(1, VOCAB, (BATCH, LENGTH + extra)).astype(np.int32)
        batch = {"tokens": tokens}
        if kind == "masked":
            is_hidden = rng.random(tokens.shape) < 0.15
            batch["labels"] = np.where(is_hidden, tokens, -100).astype(np.int32)
        if kind == "spans":
            labels = rng.integers(1, VOCAB, (BATCH, LENGTH // 4)).astype(np.int32)
            batch = {"inputs": tokens, "labels": labels}
        found.append(batch)
    return found


def coatnet() -> Any:
    """CoAtNet's shape for 64 x 64 images, ours."""
    from jaxpar.models import CoatnetConfig  # noqa: PLC0415 - only for this family

    return CoatnetConfig(
        num_classes=100,
        image_size=64,
        stem_width=32,
        widths=(32, 64, 128, 256),
        depths=(2, 2, 3, 2),
        head_size=32,
        key_bias=True,
    )
