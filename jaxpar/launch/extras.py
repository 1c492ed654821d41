"""Is an optional package there, and if not, who needs it and what installs it?

Whoever uses a package of an extra imports it by `import_extra`, when flags are read: a
run must not fail hours later for want of a package.
"""

import importlib
from typing import Any

PACKAGES = {
    "PIL": ("pillow", "images"),
    "matplotlib": ("matplotlib", "plot"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "pyarrow": ("pyarrow", "data"),
    "ray": ("ray", "ray"),
    "sklearn": ("scikit-learn", "vision"),
    "tensorboardX": ("tensorboardX", "tensorboard"),
    "wandb": ("wandb", "wandb"),
}
"""Module -> the package that has it, and jaxpar's extra that installs that."""


def import_extra(module: str, needed_by: str) -> Any:
    """Import an optional package, or say in a line what to install.

    Args:
      module: to import; the first part of its name is in `PACKAGES`.
      needed_by: what needs it, as the user typed it: "--png", "tensorboard=True".

    Returns:
      The module.

    Raises:
      ModuleNotFoundError: if the package, or one that it needs, is not installed.
    """
    name = module.partition(".")[0]
    package, extra = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_missing = (error.name or "").partition(".")[0] == name
        why = "is not installed" if is_missing else f"can't be imported ({error})"
        raise ModuleNotFoundError(
            f"{needed_by} needs {package}, which {why}: {pip_install(extra)}",
            name=error.name,
        ) from error


def pip_install(extra: str) -> str:
    """The command that installs an extra of jaxpar."""
    return f"pip install 'jaxpar[{extra}]'"
