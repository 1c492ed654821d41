"""How is a recipe planned: with its own `build`, on devices that are not present."""

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jax.sharding import Mesh

from jaxpar.config import parse
from jaxpar.mesh import MeshShape, compile_only, make_mesh
from jaxpar.planner.plan import Plan
from jaxpar.planner.plan_step import plan_step
from jaxpar.planner.subprocess import Stopped, call
from jaxpar.planner.targets import Target, parse_target


def load_recipe(path: Path) -> ModuleType:
    """Import a recipe.

    Args:
      path: a file with a frozen `Config` and ``build(config, mesh) -> jaxpar.Engine``;
        with ``tokens_per_step(config)`` as well, plans report tokens per second.

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


def plan_in_subprocess(path: Path, target: str, args: Sequence[str] = ()) -> Plan:
    """Plan a recipe in a subprocess, so that nothing else is disturbed.

    Args:
      path: the recipe.
      target: the devices, such as "h200:8x8".
      args: the recipe's own flags.

    Returns:
      The plan.

    Raises:
      ValueError: if there is no such target, the file is not a recipe, or its mesh does
        not fit the target.
      CompilerProcessError: if the compiler fails, crashes, or runs out of memory.
      SystemExit: if the flags are wrong or ask for help, after printing the message.
    """
    name = parse_target(target).name
    label = " ".join((path.name, *args, "on", name))
    return answer_of(call(f"{__name__}:plan_recipe", path, name, args, what=label))


def answer_of(answer: Any) -> Any:
    """A subprocess's result; exits where it exited as a command line does."""
    if isinstance(answer, Stopped):
        print(answer.out, end="")
        print(answer.err, end="", file=sys.stderr)
        raise SystemExit(answer.code)
    return answer


def plan_recipe(path: Path, target: str, args: Sequence[str] = ()) -> Plan:
    """Plan a recipe in this process, which must be prepared for compilers.

    Nothing is allocated: the engine is made of shapes.

    Args:
      path: the recipe.
      target: the devices.
      args: the recipe's own flags.

    Returns:
      The plan.

    Raises:
      ValueError: if the file is not a recipe, or its mesh does not fit the target.
    """
    found = parse_target(target)
    recipe = load_recipe(path)
    config = parse(recipe.Config, recipe.__doc__, list(args), prog=str(path))
    mesh = mesh_on(found, mesh_of(config))
    with compile_only():
        engine = recipe.build(config, mesh)
    tokens = getattr(recipe, "tokens_per_step", None)
    return plan_step(engine, found, tokens and tokens(config))


def mesh_on(target: Target, shape: MeshShape) -> Mesh:
    """Make a mesh of all of a target's devices: a plan is for the hardware paid for.

    Args:
      target: the devices.
      shape: devices by axis.

    Returns:
      A mesh of all of them.

    Raises:
      ValueError: if the shape has another number of devices.
    """
    devices = target.devices()
    return make_mesh(shape.resolve(len(devices)), devices)


def mesh_of(config: Any) -> MeshShape:
    """The config's mesh; all devices on data where it has none."""
    fields = {field.name for field in dataclasses.fields(config)}
    return config.mesh if "mesh" in fields else MeshShape()
