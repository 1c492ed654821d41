"""Public names, each with the module that it is loaded from when it is first used."""

from .fused import FusedOptimizer, fused_adamw, fused_lamb, fused_lion

__all__ = ["FusedOptimizer", "fused_adamw", "fused_lamb", "fused_lion"]
