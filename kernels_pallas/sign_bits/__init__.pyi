"""Public names, each with the module that it is loaded from when it is first used."""

from .api import COLUMNS, pack, pack_mean, unpack
from .reference import Packed

__all__ = ["COLUMNS", "Packed", "pack", "pack_mean", "unpack"]
