"""Public names, each with the module that it is loaded from when it is first used."""

from .api import block_sparse_attention
from .layout import BlockLayout
from .plan import Plan, Tile, make_plan

__all__ = ["BlockLayout", "Plan", "Tile", "block_sparse_attention", "make_plan"]
