"""How a run gets its devices and processes."""

from jaxpar.launch.local import choose_mesh

__all__ = ["choose_mesh"]
