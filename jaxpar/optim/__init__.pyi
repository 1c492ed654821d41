"""Public names, each with the module that it is loaded from when it is first used."""

from .fused import fused_adamw, fused_lamb, fused_lion
from .fused_update import FusedOptimizer
from .make_update import HostUpdate, MakesUpdate, Update, UpdateSpec

__all__ = [
    "FusedOptimizer",
    "HostUpdate",
    "MakesUpdate",
    "Update",
    "UpdateSpec",
    "fused_adamw",
    "fused_lamb",
    "fused_lion",
]
