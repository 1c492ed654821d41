"""Published models of Hugging Face: read, sharded, and written."""

from jaxpar.lazy import load_modules

__all__: list[str] = []

load_modules(globals())
