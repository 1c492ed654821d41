"""Attention that works out the blocks of a layout and no others.

Names are loaded when they are first used: a layout needs no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
