"""How does a recipe's config come from the command line: one frozen dataclass, by tyro.

Field names are flags (``--mesh.data 2``), docstrings are the help, and a misspelt flag
is answered with the near one.
"""

from collections.abc import Sequence
from typing import TypeVar

import tyro

Config = TypeVar("Config")


def parse(
    config: type[Config], description: str | None, args: Sequence[str] | None = None
) -> Config:
    """Read a config from the command line.

    Args:
      config: a frozen dataclass, every field with a default.
      description: what the program does, for ``--help``.
      args: the arguments; None for the process's own.

    Returns:
      The config.

    Raises:
      SystemExit: for ``--help`` (0) and for wrong arguments (2), after saying why.

    Example:
      >>> from jaxpar.mesh import MeshShape
      >>> parse(MeshShape, None, ["--data", "2"])
      MeshShape(data=2, pipe=1, tensor=1)
    """
    return tyro.cli(config, description=description, args=args)
