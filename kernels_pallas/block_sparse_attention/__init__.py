"""Attention that computes only the active blocks of a block layout.

Names are loaded at first use: a layout needs no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
