"""How is a recipe planned: its own `build`, on devices that are not here."""

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpar.config import parse
from jaxpar.mesh import MeshShape, make_mesh, only_planned
from jaxpar.plan.deviceless import prepare_process
from jaxpar.plan.plan import Plan
from jaxpar.plan.target import Target


def load_recipe(path: Path) -> ModuleType:
    """Import a recipe.

    Args:
      path: a file with a frozen `Config` and ``build(config, mesh) -> jaxpar.Engine``;
        if it has ``tokens_per_step(config)`` too, plans tell tokens per second.

    Returns:
      The module.

    Raises:
      ValueError: if there is no such file, or it has no `Config` or `build`.
    """
    if not path.is_file():
        raise ValueError(f"recipe: there is no file {str(path)!r}.")
    name = f"_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"recipe: {str(path)!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for needed in ("Config", "build"):
        if not hasattr(module, needed):
            raise ValueError(
                f"recipe: {str(path)!r} has no {needed}; a recipe has a dataclass "
                "Config, every field with a default, and build(config, mesh) that "
                "returns jaxpar.initialize(...)."
            )
    return module


def plan_recipe(path: Path, target: Target, args: Sequence[str] = ()) -> Plan:
    """Plan a recipe; in a process that has not used jax yet.

    Nothing is allocated: the engine is made of shapes.

    Args:
      path: the recipe.
      target: the devices.
      args: the recipe's own flags.

    Returns:
      The plan.

    Raises:
      ValueError: if the recipe is none, or its mesh does not fit the target.
    """
    prepare_process()
    recipe = load_recipe(path)
    config = parse(recipe.Config, recipe.__doc__, list(args))
    mesh = make_mesh(_shape_of(config), target.devices())
    with only_planned():
        engine = recipe.build(config, mesh)
    tokens = getattr(recipe, "tokens_per_step", None)
    return engine.plan(target.name, tokens_per_step=tokens and tokens(config))


def _shape_of(config: Any) -> MeshShape:
    """The config's mesh; all devices on data where it has none."""
    fields = {field.name for field in dataclasses.fields(config)}
    return config.mesh if "mesh" in fields else MeshShape()
