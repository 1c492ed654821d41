"""CoAtNet, a classifier of images by convolutions and attention, and its presets."""

from jaxpar.lazy import load_modules
from jaxpar.models.coatnet.config import CoatnetConfig
from jaxpar.models.coatnet.model import make_coatnet
from jaxpar.models.coatnet.presets import COATNET_PRESETS, coatnet_config

__all__ = ["COATNET_PRESETS", "CoatnetConfig", "coatnet_config", "make_coatnet"]

load_modules(globals())
