"""How is matplotlib imported, which only pictures need?"""

import importlib
from typing import Any


def import_matplotlib(module: str = "matplotlib.figure") -> Any:
    """Import one of matplotlib's modules.

    Args:
      module: its name.

    Returns:
      The module.

    Raises:
      ModuleNotFoundError: if matplotlib is missing; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib, which is not installed; run pip install "
            "'jaxpar[plot]', or leave --png and --html out.",
            name=error.name,
        ) from error
