"""Where do batches come from: data in any format, tokenized, and shuffled by Grain.

Names are loaded when they are first used.
"""

import lazy_loader

from jaxpar.lazy import load_modules

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
load_modules(globals())
