"""The repository's own models: a folder per family, and the layers that they share."""

from jaxpar.lazy import load_modules
from jaxpar.models.gpt import (
    PRESETS,
    GPTConfig,
    continue_text,
    generate,
    gpt_config,
    gpt_loss,
    make_gpt,
    num_params,
)
from jaxpar.models.sparse_attention import (
    SparseSelfAttention,
    sparse_attention,
    tile_work_of,
)

__all__ = [
    "PRESETS",
    "GPTConfig",
    "SparseSelfAttention",
    "continue_text",
    "generate",
    "gpt_config",
    "gpt_loss",
    "make_gpt",
    "num_params",
    "sparse_attention",
    "tile_work_of",
]

load_modules(globals())
