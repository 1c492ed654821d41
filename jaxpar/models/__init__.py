"""The repo's own models: a GPT, its presets, its loss, and sampling from it."""

from jaxpar.models.gpt import GPT, gpt_loss
from jaxpar.models.gpt_config import GPTConfig, num_params
from jaxpar.models.gpt_pipeline import pipeline_gpt
from jaxpar.models.presets import PRESETS, gpt_config
from jaxpar.models.sampling import continue_text, generate
from jaxpar.models.sparse_attention import (
    SparseSelfAttention,
    plan_of,
    sparse_attention,
)

__all__ = [
    "GPT",
    "PRESETS",
    "GPTConfig",
    "SparseSelfAttention",
    "continue_text",
    "generate",
    "gpt_config",
    "gpt_loss",
    "num_params",
    "pipeline_gpt",
    "plan_of",
    "sparse_attention",
]
