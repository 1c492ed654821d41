"""Which models have names? The well-known sizes, and those of Megatron-LM's table."""

import dataclasses
from typing import Any

from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.tree import near_match


def _megatron(width: int, num_layers: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=51_200,
        seq_len=2048,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
        remat="full",
    )


def _llama(
    width: int,
    num_layers: int,
    num_heads: int,
    *,
    mlp_width: int,
    num_kv_heads: int | None = None,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=32_000,
        seq_len=4096,
        num_layers=num_layers,
        num_heads=num_heads,
        width=width,
        mlp_width=mlp_width,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied_embedding=False,
        num_kv_heads=num_kv_heads,
    )


def _small(vocab_size: int, seq_len: int, num_experts: int = 0) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        seq_len=seq_len,
        experts=ExpertsConfig(num=num_experts),
        num_layers=4,
        num_heads=4,
        width=128,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
    )


PRESETS: dict[str, DecoderConfig] = {
    "tiny": _small(vocab_size=256, seq_len=256),
    "1m": _small(vocab_size=2048, seq_len=128),
    "1m-moe": _small(vocab_size=2048, seq_len=128, num_experts=8),
    "124m": DecoderConfig(
        vocab_size=50_304, seq_len=1024, num_layers=12, num_heads=12, width=768
    ),
    "350m": DecoderConfig(
        vocab_size=50_304, seq_len=1024, num_layers=24, num_heads=16, width=1024
    ),
    "1.3b": DecoderConfig(
        vocab_size=50_304, seq_len=2048, num_layers=24, num_heads=16, width=2048
    ),
    "7b": _llama(4096, 32, 32, mlp_width=11_008),
    "70b": _llama(8192, 80, 64, mlp_width=28_672, num_kv_heads=8),
    "8b": dataclasses.replace(
        _llama(4096, 32, 32, mlp_width=14_336, num_kv_heads=8),
        vocab_size=128_256,
        seq_len=8192,
        rotary_base=500_000.0,
    ),
    "mixtral-8x7b": dataclasses.replace(
        _llama(4096, 32, 32, mlp_width=14_336, num_kv_heads=8),
        seq_len=32_768,
        rotary_base=1e6,
        experts=ExpertsConfig(num=8, balance_loss=0.02),
    ),
    "1.7b": _megatron(2304, 24, 24),
    "3.6b": _megatron(3072, 30, 32),
    "7.5b": _megatron(4096, 36, 32),
    "18.4b": _megatron(6144, 40, 48),
    "39.1b": _megatron(8192, 48, 64),
    "76.1b": _megatron(10_240, 60, 80),
    "145.6b": _megatron(12_288, 80, 96),
    "310.1b": _megatron(16_384, 96, 128),
    "529.6b": _megatron(20_480, 105, 128),
    "1008b": _megatron(25_600, 128, 160),
}
"""Decoder configs by name.

"tiny" reads bytes, "1m" byte pairs, and "1m-moe" has eight experts in the place of each
of its MLPs; they train on a CPU. "124m", "350m" and "1.3b" are GPT-2's and GPT-3's
shapes, with the vocabulary rounded up so that a tensor axis divides it; "7b" and "70b"
are Llama's and Llama 2's, "8b" is Llama 3's, "mixtral-8x7b" is Mixtral's. The rest are
Megatron-LM's, whose runs recompute every layer.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters" (2021), table 1, for "1.7b" to "1008b".
"""


def decoder_config(name: str, **overrides: Any) -> DecoderConfig:
    """Look up a preset, and replace fields.

    Args:
      name: one of `PRESETS`.
      **overrides: fields of `DecoderConfig` to replace.

    Returns:
      The config.

    Raises:
      ValueError: if there is no such preset, or no such field.

    Example:
      >>> decoder_config("124m", seq_len=2048).width
      768
    """
    if name not in PRESETS:
        raise ValueError(
            f"decoder_config: name={name!r} must be one of "
            f"{', '.join(map(repr, PRESETS))}.{near_match(name, list(PRESETS))}"
        )
    fields = [field.name for field in dataclasses.fields(DecoderConfig)]
    for field in overrides:
        if field not in fields:
            raise ValueError(
                f"decoder_config: {field}={overrides[field]!r} is not a field of "
                f"DecoderConfig.{near_match(field, fields)}"
            )
    return dataclasses.replace(PRESETS[name], **overrides)
