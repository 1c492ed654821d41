"""The repository's own models: a folder per family, and the layers that they share."""

from jaxpar.models.gpt import (
    GPT,
    PRESETS,
    GPTConfig,
    as_gpt,
    continue_text,
    generate,
    gpt_config,
    gpt_loss,
    num_params,
    pipeline_gpt,
)
from jaxpar.models.sparse_attention import (
    SparseSelfAttention,
    sparse_attention,
    tile_work_of,
)

__all__ = [
    "GPT",
    "PRESETS",
    "GPTConfig",
    "SparseSelfAttention",
    "as_gpt",
    "continue_text",
    "generate",
    "gpt_config",
    "gpt_loss",
    "num_params",
    "pipeline_gpt",
    "sparse_attention",
    "tile_work_of",
]
