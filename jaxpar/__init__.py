"""jaxpar: sharded training for Flax models on a named mesh.

The public names are those of ``__init__.pyi``. Each is loaded when it is first used, as
is every module (``jaxpar.step.loss_check``), so that code that needs no JAX, such as
the supervisor of a run, does not start it.
"""

import lazy_loader

from jaxpar.lazy import load_modules

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
load_modules(globals())
