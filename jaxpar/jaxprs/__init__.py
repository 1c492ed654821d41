"""Traced functions: what depends on what, evaluated, and computed in pieces."""

from jaxpar.lazy import load_modules

load_modules(globals())
