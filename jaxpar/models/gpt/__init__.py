"""A GPT with stacked layers, its loss, presets and sampling."""

from jaxpar.models.gpt.config import GPTConfig, num_params
from jaxpar.models.gpt.model import GPT, gpt_loss
from jaxpar.models.gpt.pipeline import as_gpt, pipeline_gpt
from jaxpar.models.gpt.presets import PRESETS, gpt_config
from jaxpar.models.gpt.sampling import continue_text, generate

__all__ = [
    "GPT",
    "PRESETS",
    "GPTConfig",
    "as_gpt",
    "continue_text",
    "generate",
    "gpt_config",
    "gpt_loss",
    "num_params",
    "pipeline_gpt",
]
