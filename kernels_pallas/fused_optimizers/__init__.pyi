"""Public names, each with the module that it is loaded from when it is first used."""

from .api import (
    Numbers,
    Updated,
    dequantize,
    fused_update,
    init_moments,
    quantize,
)
from .leaves import Leaves
from .rules import AdamW, Lion, Rule
from .tiles import TILE, Quantized

__all__ = [
    "TILE",
    "AdamW",
    "Leaves",
    "Lion",
    "Numbers",
    "Quantized",
    "Rule",
    "Updated",
    "dequantize",
    "fused_update",
    "init_moments",
    "quantize",
]
