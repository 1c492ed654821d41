"""A GPT with stacked layers, its loss, presets and sampling."""

from jaxpar.lazy import load_modules
from jaxpar.models.gpt.config import GPTConfig, num_params
from jaxpar.models.gpt.loss import gpt_loss
from jaxpar.models.gpt.model import make_gpt
from jaxpar.models.gpt.presets import PRESETS, gpt_config
from jaxpar.models.gpt.sampling import continue_text, generate

__all__ = [
    "PRESETS",
    "GPTConfig",
    "continue_text",
    "generate",
    "gpt_config",
    "gpt_loss",
    "make_gpt",
    "num_params",
]

load_modules(globals())
