"""Which decoder does a published config describe?"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.hf.families import Published, require
from jaxpar.models.rotary import RotaryScaling

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read_gpt2(hf: Published) -> dict[str, Any]:
    """The fields of a GPT-2."""
    require(hf, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    require(hf, "scale_attn_weights", True)
    require(hf, "scale_attn_by_inverse_layer_idx", False)
    return {
        "vocab_size": hf["vocab_size"],
        "num_tokens": hf["vocab_size"],
        "seq_len": hf["n_positions"],
        "num_layers": hf["n_layer"],
        "num_heads": hf["n_head"],
        "width": hf["n_embd"],
        "mlp_width": hf.get("n_inner"),
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "key_bias": True,
        "tied_embedding": hf.get("tie_word_embeddings", True),
    }


def read_llama(hf: Published) -> dict[str, Any]:
    """The fields of a Llama."""
    require(hf, "attention_bias", False)
    require(hf, "mlp_bias", False)
    require(hf, "hidden_act", "silu")
    base, scaling = _rotary(hf)
    return {**_shared(hf), "rotary_base": base, "rotary_scaling": scaling}


def read_mistral(hf: Published) -> dict[str, Any]:
    """The fields of a Mistral."""
    return {**read_llama(hf), "window": hf.get("sliding_window")}


def read_qwen2(hf: Published) -> dict[str, Any]:
    """The fields of a Qwen 2: queries, keys and values have a bias."""
    require(hf, "use_sliding_window", False)
    return {**read_llama(hf), "qkv_bias": True, "key_bias": True}


def read_qwen3(hf: Published) -> dict[str, Any]:
    """The fields of a Qwen 3: query and key heads are normalised."""
    require(hf, "use_sliding_window", False)
    return {**read_llama(hf), "qk_norm": "heads"}


def read_gemma2(hf: Published) -> dict[str, Any]:
    """The fields of a Gemma 2: caps, and a window in every other block."""
    require(hf, "attention_bias", False)
    require(hf, "hidden_activation", "gelu_pytorch_tanh")
    base, scaling = _rotary(hf)
    return {
        **_shared(hf),
        "activation": "geglu",
        "norm": "rmsnorm_plus_one",
        "post_norm": True,
        "tied_embedding": hf.get("tie_word_embeddings", True),
        "embedding_scale": math.sqrt(hf["hidden_size"]),
        "attention_scale": hf["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": hf.get("attn_logit_softcapping"),
        "logits_softcap": hf.get("final_logit_softcapping"),
        "window": hf["sliding_window"],
        "global_every": _global_every(hf, 2),
        "rotary_base": base,
        "rotary_scaling": scaling,
    }


def read_gemma3(hf: Published) -> dict[str, Any]:
    """The fields of a Gemma 3's text model: as Gemma 2, with other positions nearby."""
    local = hf.get("rope_local_base_freq", 10_000.0)
    found = hf.get("rope_parameters") or {}
    if LOCAL in found:
        local = found[LOCAL]["rope_theta"]
    require(hf, "use_bidirectional_attention", False, None)
    every = _global_every(hf, hf.get("sliding_window_pattern", 6))
    fields = {"qk_norm": "heads", "local_rotary_base": local, "global_every": every}
    return {**read_gemma2(hf), **fields}


def read_mixtral(hf: Published) -> dict[str, Any]:
    """The fields of a Mixtral: a Mistral whose MLPs are experts."""
    require(hf, "router_jitter_noise", 0.0)
    experts = ExpertsConfig(
        num=_num_experts(hf),
        top_k=hf["num_experts_per_tok"],
        balance_loss=hf.get("router_aux_loss_coef", 0.001),
    )
    return {**read_mistral(hf), "experts": experts}


def read_qwen2_moe(hf: Published) -> dict[str, Any]:
    """The fields of a Qwen 2 with experts, one of which every token goes to."""
    shared = {"shared_width": hf["shared_expert_intermediate_size"]}
    experts = _qwen_experts(hf, **shared, shared_gate=True)
    return {**read_qwen2(hf), "experts": experts}


def read_qwen3_moe(hf: Published) -> dict[str, Any]:
    """The fields of a Qwen 3 with experts."""
    return {**read_qwen3(hf), "experts": _qwen_experts(hf)}


def read_olmoe(hf: Published) -> dict[str, Any]:
    """The fields of an OLMoE: queries and keys are normalised over all heads."""
    require(hf, "clip_qkv", None)
    experts = ExpertsConfig(
        num=_num_experts(hf),
        top_k=hf["num_experts_per_tok"],
        normalise_gates=hf.get("norm_topk_prob", False),
        balance_loss=hf.get("router_aux_loss_coef", 0.01),
    )
    return {**read_llama(hf), "qk_norm": "width", "experts": experts}


def _num_experts(hf: Published) -> int:
    """The number, under the name that versions 4 or 5 of transformers write."""
    known = [name for name in ("num_local_experts", "num_experts") if name in hf]
    return hf[known[0] if known else "num_experts"]


def _qwen_experts(hf: Published, **more: Any) -> ExpertsConfig:
    require(hf, "mlp_only_layers", [], None)
    return ExpertsConfig(
        num=_num_experts(hf),
        top_k=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        every=hf.get("decoder_sparse_step", 1),
        normalise_gates=hf.get("norm_topk_prob", False),
        balance_loss=hf.get("router_aux_loss_coef", 0.001),
        **more,
    )


READERS: dict[str, Callable[[Published], dict[str, Any]]] = {
    "gpt2": read_gpt2,
    "llama": read_llama,
    "mistral": read_mistral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3,
    "mixtral": read_mixtral,
    "qwen2_moe": read_qwen2_moe,
    "qwen3_moe": read_qwen3_moe,
    "olmoe": read_olmoe,
}
"""By model_type, what reads the fields of `DecoderConfig`."""


def _shared(hf: Published) -> dict[str, Any]:
    """What the configs of all but GPT-2 have in common."""
    return {
        "vocab_size": hf["vocab_size"],
        "num_tokens": hf["vocab_size"],
        "seq_len": hf["max_position_embeddings"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "num_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "width": hf["hidden_size"],
        "head_width": hf.get("head_dim"),
        "mlp_width": hf["intermediate_size"],
        "activation": "swiglu",
        "norm": "rmsnorm",
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "bias": False,
        "positions": "rotary",
        "tied_embedding": hf.get("tie_word_embeddings", False),
    }


def _rotary(hf: Published) -> tuple[float, RotaryScaling | None]:
    """The base and the scaling, as versions 4 and 5 of transformers write them."""
    found: Published = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    found = found.get(GLOBAL, found)
    base = found.get("rope_theta") or hf.get("rope_theta", 10_000.0)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RotaryScaling(kind="linear", factor=found["factor"])
    if kind == "llama3":
        scaling = RotaryScaling(
            kind="llama3",
            factor=found["factor"],
            low=found["low_freq_factor"],
            high=found["high_freq_factor"],
            original_len=found["original_max_position_embeddings"],
        )
        return base, scaling
    raise ValueError(
        f"{hf['model_type']}: rotary positions of type {kind!r} are not known here; "
        "default, linear and llama3 are."
    )


def _global_every(hf: Published, usual: int) -> int | None:
    """Of how many blocks the last sees everything, from ``layer_types``."""
    kinds: Sequence[str] = hf.get("layer_types") or ()
    if not kinds:
        return usual
    wholes = [place for place, kind in enumerate(kinds, 1) if kind == GLOBAL]
    if not wholes:
        return None
    every = wholes[0]
    if wholes != list(range(every, len(kinds) + 1, every)) or every < 2:
        raise ValueError(
            f"{hf['model_type']}: blocks {wholes} see everything; a decoder here needs "
            "every n-th block to do so, from the n-th on."
        )
    return every
