"""Small models of Hugging Face's, at random, as the oracle of ours.

`transformers` on torch's CPU, eager attention.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}

EXPERTS = {
    **SIZES,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 96,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama": ("LlamaConfig", SIZES),
    "llama3": ("LlamaConfig", {**SIZES, "rope_parameters": LLAMA3}),
    "llama-tied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 8, "head_dim": 16}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "mixtral": (
        "MixtralConfig",
        {**SIZES, "num_local_experts": 4, "router_aux_loss_coef": 0.3},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.2,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "decoder_sparse_step": 2}),
    "olmoe": ("OlmoeConfig", {**EXPERTS, "num_key_value_heads": 4}),
    "gemma2": (
        "Gemma2Config",
        {
            **SIZES,
            **GEMMA,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **SIZES,
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1_000_000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A model of theirs, and what it makes of a batch.

    Attributes:
      folder: that it is saved in.
      batch: what our loss takes.
      logits: of the model on the batch.
      loss: of the batch.
      grads: tensor -> the loss's gradient.
    """

    folder: Path
    batch: dict[str, np.ndarray]
    logits: np.ndarray
    loss: float
    grads: dict[str, np.ndarray]

    @property
    def tokens(self) -> np.ndarray:
        """The batch's tokens."""
        return self.batch["tokens"]


def moved(model: Any) -> Any:
    """A model whose every parameter is random: norms and biases start at constants."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    return model.eval()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, np.ndarray]:
    """The gradients of a loss; parameters that it does not use have none."""
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    return {n: p.grad.numpy() for n, p in named if p.grad is not None}


def tokens_of(vocab: int, length: int = 24) -> np.ndarray:
    """Rows of tokens."""
    return np.random.default_rng(0).integers(0, vocab, (4, length)).astype(np.int32)


def publish(name: str, folder: Path, **saving: Any) -> Published:
    """Make a model at random, save it, and run it."""
    kind, fields = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    moved(model).save_pretrained(folder, **saving)
    tokens = tokens_of(config.vocab_size)
    return Published(folder, {"tokens": tokens}, *run(model, tokens))


def run(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, float, dict]:
    """Logits, loss and gradients."""
    model.eval()
    inputs = torch.tensor(tokens, dtype=torch.long)
    logits = model(input_ids=inputs, use_cache=False).logits
    rows = logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(rows, inputs[:, 1:].flatten())
    if hasattr(model, "num_experts"):
        loss = loss + routers_loss(model, inputs[:, :-1])
    return logits.detach().numpy(), float(loss.detach()), gradients(model, loss)


def routers_loss(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Their balance loss, a mean over layers: they pool the layers' statistics."""
    found = model(input_ids=inputs, use_cache=False, output_router_logits=True)
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    how = model.num_experts, model.num_experts_per_tok
    own = [balance((logits,), *how) for logits in found.router_logits]
    return model.router_aux_loss_coef * sum(own) / len(own)


def reload(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits of a folder's model, loaded by them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return run(model, tokens)[0]
