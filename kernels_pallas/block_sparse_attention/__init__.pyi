"""Public names, each with the module that it is loaded from when it is first used."""

from .api import block_sparse_attention
from .layout import BlockLayout
from .tile_work import Tile, TileWork, make_tile_work

__all__ = [
    "BlockLayout",
    "Tile",
    "TileWork",
    "block_sparse_attention",
    "make_tile_work",
]
