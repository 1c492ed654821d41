"""Patterns of sparse attention: which blocks of a sequence see which."""

from jaxpar.lazy import load_modules
from jaxpar.sparse_attention.causal import causal_pattern
from jaxpar.sparse_attention.layouts import SparsityPattern, make_layout
from jaxpar.sparse_attention.patterns import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
)

__all__ = [
    "BSLongformer",
    "BigBird",
    "Dense",
    "Fixed",
    "LocalSlidingWindow",
    "SparsityPattern",
    "Variable",
    "causal_pattern",
    "make_layout",
]

load_modules(globals())
