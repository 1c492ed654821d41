"""Reading and evaluating traced functions."""

from jaxpar.lazy import load_modules

load_modules(globals())
