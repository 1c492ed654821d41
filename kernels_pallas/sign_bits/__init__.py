"""Signs in one bit an element: packed in the pass that adds an error, and unpacked.

Names are loaded at first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
