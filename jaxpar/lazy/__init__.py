"""How does a package's module work by attribute, without being imported at the start?

``import jaxpar`` starts no JAX; ``jaxpar.step.loss_check`` then imports that module.
"""

import importlib
import pkgutil
from typing import Any


def load_modules(package: dict[str, Any]) -> None:
    """Let a package's modules be its attributes, imported when they are first used.

    Args:
      package: the ``globals()`` of its ``__init__``, at the end of it. A
        ``__getattr__`` that is there is asked for the names in ``__all__``.
    """
    own, names = package["__name__"], package.get("__all__", ())
    load_name = package.get("__getattr__")
    modules = {each.name for each in pkgutil.iter_modules(package["__path__"])}
    modules.discard("__main__")  # Importing it runs the command.

    def load(name: str) -> Any:
        if load_name is not None and name in names:
            return load_name(name)
        if name in modules:
            return importlib.import_module(f"{own}.{name}")
        raise AttributeError(f"module {own!r} has no attribute {name!r}")

    package["__getattr__"] = load
    package["__dir__"] = lambda: sorted({*package, *names, *modules})
