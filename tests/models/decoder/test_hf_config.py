"""Is a published config read, as versions 4 and 5 of transformers write it?"""

from typing import Any

import pytest

from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.hf_families import DECODERS
from jaxpar.models.rotary import RotaryScaling


def read_decoder(hf: dict[str, Any]) -> DecoderConfig:
    return DECODERS[hf["model_type"]].read_config(hf)


BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GEMMA = {
    **BASE,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def test_rotary_positions_of_both_versions_are_the_same() -> None:
    llama = {**BASE, "model_type": "llama"}
    four = read_decoder({**llama, "rope_theta": 5e5, "rope_scaling": SCALING})
    five = read_decoder({**llama, "rope_parameters": {**SCALING, "rope_theta": 5e5}})
    assert four == five
    assert four.rotary_base == 5e5
    assert four.rotary_scaling == RotaryScaling(factor=32.0, original_len=8192)


def test_gemma_3_of_both_versions_is_the_same() -> None:
    gemma = {**GEMMA, "model_type": "gemma3_text", "rms_norm_eps": 1e-6}
    linear = {"rope_type": "linear", "factor": 8.0}
    four = read_decoder(
        {
            **gemma,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": linear,
            "sliding_window_pattern": 3,
        }
    )
    by_kind = {
        GLOBAL: {**linear, "rope_theta": 1e6},
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = [LOCAL, LOCAL, GLOBAL] * 2
    five = read_decoder({**gemma, "rope_parameters": by_kind, "layer_types": kinds})
    assert four == five
    assert (five.global_every, five.local_rotary_base) == (3, 1e4)


def test_gemma_2_caps_and_scales() -> None:
    config = read_decoder(
        {
            **GEMMA,
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    )
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert (config.attention_scale, config.global_every) == (0.25, 2)
    assert config.embedding_scale == pytest.approx(32**0.5)


def test_an_encoder_in_the_shape_of_gemma_3_is_refused() -> None:
    hf = {**GEMMA, "model_type": "gemma3_text"}
    assert read_decoder({**hf, "use_bidirectional_attention": None}).window == 8
    with pytest.raises(ValueError, match="use_bidirectional_attention=True is not"):
        read_decoder({**hf, "use_bidirectional_attention": True})


def test_a_pattern_of_windows_that_is_not_known_is_refused() -> None:
    kinds = [GLOBAL, LOCAL, LOCAL, LOCAL, LOCAL, GLOBAL]
    with pytest.raises(ValueError, match=r"gemma2: blocks \[1, 6\] see everything"):
        read_decoder({**GEMMA, "model_type": "gemma2", "layer_types": kinds})
