"""A decoder with stacked layers, its loss, presets and sampling."""

from jaxpar.lazy import load_modules
from jaxpar.models.decoder.config import DecoderConfig, num_params
from jaxpar.models.decoder.loss import decoder_loss
from jaxpar.models.decoder.model import make_decoder
from jaxpar.models.decoder.presets import PRESETS, decoder_config
from jaxpar.models.decoder.sampling import continue_text, generate

__all__ = [
    "PRESETS",
    "DecoderConfig",
    "continue_text",
    "decoder_config",
    "decoder_loss",
    "generate",
    "make_decoder",
    "num_params",
]

load_modules(globals())
