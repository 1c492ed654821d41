"""Flax models as pure functions.

`bridge` converts NNX modules, `linen` Linen modules; `blocks` is a model that a
pipeline can divide into stages, run by `network` and recorded by `proxies`. `scopes`
names a program's operations by the model's modules.
"""

from jaxpar.lazy import load_modules

load_modules(globals())
