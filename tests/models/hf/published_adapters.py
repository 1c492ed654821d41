"""Adapters of PEFT, as the oracle of ours."""

from pathlib import Path

import numpy as np
import peft
import torch
import transformers

from tests.models.hf.published import Published, publish, run


def publish_adapter(name: str, folder: Path, **how) -> Published:
    """A model at random with adapters at random, saved apart; and what both make."""
    publish(name, folder / "model")
    model = _base(folder / "model")
    config = peft.LoraConfig(task_type="CAUSAL_LM", **how)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for param_name, param in adapted.named_parameters():
            if "lora_" in param_name:
                param.copy_(0.1 * torch.randn_like(param))
    adapted.save_pretrained(folder / "adapter")
    tokens = np.random.default_rng(0).integers(0, 96, (4, 24)).astype(np.int32)
    logits, loss, grads = run(adapted, tokens)
    return Published(folder / "model", {"tokens": tokens}, logits, loss, grads)


def reload_adapter(model: Path, adapter: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits of a model and adapters in folders, loaded by them."""
    return run(
        peft.PeftModel.from_pretrained(_base(model), adapter, is_trainable=True), tokens
    )[0]


def _base(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
