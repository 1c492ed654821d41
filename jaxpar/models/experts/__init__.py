"""A mixture of experts: its config, routing, dispatch and matmuls."""

from jaxpar.lazy import load_modules
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.experts.layer import Experts
from jaxpar.models.experts.routing import RouterStatistics

__all__ = ["Experts", "ExpertsConfig", "RouterStatistics"]

load_modules(globals())
