"""How is a run trained unattended: the loop, its folder, its logs, and its recovery."""

from jaxpar.lazy import load_modules

load_modules(globals())
