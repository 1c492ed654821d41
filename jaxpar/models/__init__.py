"""The repository's own models: a folder per family, and the layers that they share."""

from jaxpar.lazy import load_modules
from jaxpar.model.layer_drop import LayerDrop
from jaxpar.model.token_drop import RandomLTD
from jaxpar.models.bert import (
    BertConfig,
    make_bert,
    make_bert_loss,
    masked_word_accuracy,
    num_bert_params,
    pretraining_batch,
)
from jaxpar.models.classification import (
    classification_loss,
    classification_metrics,
)
from jaxpar.models.coatnet import (
    COATNET_PRESETS,
    CoatnetConfig,
    coatnet_config,
    make_coatnet,
)
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
from jaxpar.models.t5 import T5_PRESETS, T5Config, make_t5, t5_loss
from jaxpar.models.tiled import TiledDense, TiledMLP
from jaxpar.models.vit import VIT_PRESETS, VitConfig, make_vit, vit_config

__all__ = [
    "COATNET_PRESETS",
    "PRESETS",
    "T5_PRESETS",
    "VIT_PRESETS",
    "BertConfig",
    "CoatnetConfig",
    "DecoderConfig",
    "LayerDrop",
    "RandomLTD",
    "SparseSelfAttention",
    "T5Config",
    "TiledDense",
    "TiledMLP",
    "VitConfig",
    "classification_loss",
    "classification_metrics",
    "coatnet_config",
    "continue_text",
    "decoder_config",
    "decoder_loss",
    "from_huggingface",
    "generate",
    "make_bert",
    "make_bert_loss",
    "make_coatnet",
    "make_decoder",
    "make_t5",
    "make_vit",
    "masked_word_accuracy",
    "num_bert_params",
    "num_params",
    "pretraining_batch",
    "sparse_attention",
    "t5_loss",
    "tile_work_of",
    "to_huggingface",
    "vit_config",
]

load_modules(globals())
