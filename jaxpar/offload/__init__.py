"""Offload: what a device has no room for is stored on its host, and streamed."""

from jaxpar.lazy import load_modules
from jaxpar.offload.options import Offload

__all__ = ["Offload"]

load_modules(globals())
