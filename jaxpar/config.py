"""How is a recipe's config read from the command line: one frozen dataclass, by tyro.

Field names are flags (``--mesh.data 2``), docstrings are the help, and an error for a
misspelt flag suggests the nearest one. ``--config run.json`` gives the flags of a file.
``--mesh auto --target h200:1x8`` first runs the caller's search for the mesh and the
settings that depend on it.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

Config = TypeVar("Config")

Search = Callable[[Path, str, Sequence[str]], Sequence[str]]
"""``(recipe, target, flags) -> flags`` of the best mesh and its settings."""

_FILE = (
    "--config FILE takes flags from a run's run.json, or from another file of JSON or "
    "YAML with their names; flags beside it win."
)

_AUTO = (
    "--mesh auto --target h200:1x8 picks the mesh, and the ZeRO stage, micro-batches, "
    "schedule and remat policy without a flag: the fastest for those devices by "
    "`jaxpar plan --search`."
)


def parse(
    config: type[Config],
    description: str | None,
    args: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    search: Search | None = None,
) -> Config:
    """Read a config from the command line.

    Args:
      config: a frozen dataclass, every field with a default.
      description: what the program does, for ``--help``.
      args: the arguments; None for the process's own.
      prog: the program's name; None for the process's own.
      search: finds the flags for ``--mesh auto``; None if that is not supported.

    Returns:
      The config.

    Raises:
      SystemExit: for ``--help`` (0) and for wrong arguments (2), after saying why.

    Example:
      >>> from jaxpar.mesh import MeshShape
      >>> parse(MeshShape, None, ["--data", "2"])
      MeshShape(data=2, pipe=1, tensor=1)
    """
    given = list(sys.argv[1:] if args is None else args)
    if dataclasses.is_dataclass(config):
        description = "\n\n".join(filter(None, (description, _FILE)))
        given = _with_file(given)
    if search is not None and _has_mesh(config):
        description = "\n\n".join(filter(None, (description, _AUTO)))
        given = _searched(config, given, search)
    return tyro.cli(config, prog=prog, description=description, args=given)


def _with_file(given: list[str]) -> list[str]:
    """The arguments, with ``--config FILE`` replaced by the file's flags, first."""
    file, others = _taken(given, "--config")
    if file is None:
        return given
    try:
        settings = _read(Path(file))
    except (OSError, ValueError) as error:
        _stop(f"--config {file}: {error}")
    return [*_flags(settings, "--"), *others]


def _read(path: Path) -> Mapping[str, Any]:
    """The settings in a file: a run's record, or names and values."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        import yaml  # noqa: PLC0415 - only here; Flax brings it

        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"is not YAML ({error})") from None
    else:
        found = json.loads(text)
    if isinstance(found, dict) and {"config", "identity"} <= found.keys():
        found = found["config"]
    if not isinstance(found, dict):
        raise ValueError("must have names and values, such as steps: 100")
    return found


def _flags(settings: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Settings as flags; a value that is a mapping has its names below its own."""
    for name, value in settings.items():
        flag = prefix + str(name).replace("_", "-")
        if isinstance(value, Mapping):
            yield from _flags(value, f"{flag}.")
        elif isinstance(value, bool):
            head, _, own = flag.rpartition(".")
            no = f"{head}.no-{own}" if head else f"--no-{own.removeprefix('--')}"
            yield flag if value else no
        elif isinstance(value, list | tuple):
            yield from (flag, *map(str, value))
        else:
            own = str(value)  # In one word where it looks like a flag: -1.
            yield from ([f"{flag}={own}"] if own.startswith("-") else [flag, own])


def _has_mesh(config: Any) -> bool:
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return any(field.name == "mesh" for field in fields)


def _searched(config: Any, given: list[str], search: Search) -> list[str]:
    """The arguments, with ``--mesh auto`` replaced by the best flags."""
    mesh, others = _taken(given, "--mesh")
    if mesh != "auto":
        return given
    target, others = _taken(others, "--target")
    if {"-h", "--help"} & set(others):
        return others
    if target is None:
        _stop("--mesh auto needs --target: the devices of the run, such as h200:1x8.")
    recipe = getattr(sys.modules[config.__module__], "__file__", None)
    if recipe is None:
        _stop(
            f"--mesh auto: {config.__qualname__} must be in a file, which is searched "
            "as the recipe; in a notebook, pass the mesh sizes."
        )
    flags = search(Path(recipe), target, others)
    print(f"--mesh auto: {' '.join(flags)}", flush=True)
    return [*others, *flags]


def _taken(args: list[str], flag: str) -> tuple[str | None, list[str]]:
    """A flag's value, and the arguments without it."""
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name == flag and equals:
            return value, args[:i] + args[i + 1 :]
        if name == flag:
            return "".join(args[i + 1 : i + 2]), args[:i] + args[i + 2 :]
    return None, args


def _stop(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)
