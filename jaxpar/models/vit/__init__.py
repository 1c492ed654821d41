"""A classifier of images whose tokens are patches."""

from jaxpar.lazy import load_modules
from jaxpar.models.vit.config import VitConfig
from jaxpar.models.vit.model import make_vit
from jaxpar.models.vit.presets import VIT_PRESETS, vit_config

__all__ = ["VIT_PRESETS", "VitConfig", "make_vit", "vit_config"]

load_modules(globals())
