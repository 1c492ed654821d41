"""T5: an encoder and a decoder with biases of relative positions, and their loss."""

from jaxpar.lazy import load_modules
from jaxpar.models.t5.config import T5Config
from jaxpar.models.t5.loss import t5_loss
from jaxpar.models.t5.model import make_t5
from jaxpar.models.t5.presets import T5_PRESETS

__all__ = ["T5_PRESETS", "T5Config", "make_t5", "t5_loss"]

load_modules(globals())
