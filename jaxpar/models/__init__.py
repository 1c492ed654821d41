"""The repository's own models: a folder per family, and the layers that they share."""

from jaxpar.lazy import load_modules
from jaxpar.models.decoder import (
    PRESETS,
    DecoderConfig,
    continue_text,
    decoder_config,
    decoder_loss,
    generate,
    make_decoder,
    num_params,
)
from jaxpar.models.hf.pretrained import from_huggingface, to_huggingface
from jaxpar.models.sparse_attention import (
    SparseSelfAttention,
    sparse_attention,
    tile_work_of,
)

__all__ = [
    "PRESETS",
    "DecoderConfig",
    "SparseSelfAttention",
    "continue_text",
    "decoder_config",
    "decoder_loss",
    "from_huggingface",
    "generate",
    "make_decoder",
    "num_params",
    "sparse_attention",
    "tile_work_of",
    "to_huggingface",
]

load_modules(globals())
