"""How is a recipe's config read from the command line: one frozen dataclass, by tyro.

Field names are flags (``--mesh.data 2``), docstrings are the help, and an error for a
misspelt flag suggests the nearest one. ``--config run.json`` gives the flags of a file.
``--model 124m --model.num-layers 8`` overrides a field of a preset (`preset`).
``--mesh auto --target h200:1x8`` first runs the caller's search for the mesh and the
settings that depend on it.
"""

import dataclasses
import difflib
import functools
import json
import operator
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

Config = TypeVar("Config")
Chosen = TypeVar("Chosen")

SEARCHED = ("mesh", "zero", "accumulate", "schedule", "remat")
"""Fields of a config that ``--mesh auto`` chooses (`jaxpar.planner.choices.KNOBS`)."""

HIDDEN = "(hidden)"
"""What a run's record has instead of a secret (`jaxpar.training.secret_values`)."""

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


def preset(
    presets: Mapping[str, Chosen], name: str, *, without: Collection[str] = ()
) -> Chosen:
    """Make a config field that is chosen by preset name and overridden field by field.

    ``--model 124m --model.num-layers 8`` is the preset with another number of layers;
    ``run.json`` records all fields.

    Args:
      presets: name -> a frozen dataclass; of several classes, if each has a field
        ``kind``, its name here, that is not an argument.
      name: of the default.
      without: fields that get no flag, such as those that the recipe sets.

    Returns:
      A dataclass's field.

    Example:
      >>> from jaxpar.mesh import MeshShape
      >>> @dataclasses.dataclass(frozen=True)
      ... class Run:
      ...     mesh: MeshShape = preset({"one": MeshShape(), "two": MeshShape(2)}, "one")
      >>> parse(Run, None, ["--mesh", "two", "--mesh.tensor", "4"]).mesh
      MeshShape(data=2, pipe=1, tensor=4)
    """
    return dataclasses.field(
        default=presets[name],
        metadata={"presets": presets, "name": name, "without": tuple(without)},
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
        given = _with_file(config, given)
    if search is not None and _has_mesh(config):
        description = "\n\n".join(filter(None, (description, _AUTO)))
        given = _searched(config, given, search)
    options = {"prog": prog, "args": given}
    if not _presets(config):
        return tyro.cli(config, description=description, **options)
    chosen, options["args"] = _chosen(config, given)
    described = [description, *map(_describe, _presets(config))]
    flat = tyro.cli(
        _flattened(config, chosen),
        description="\n\n".join(filter(None, described)),
        **options,
    )
    return _rebuilt(config, chosen, flat)


def _presets(config: Any) -> list[dataclasses.Field]:
    """The fields of a config that were made by `preset`."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return [field for field in fields if "presets" in field.metadata]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe(field: dataclasses.Field) -> str:
    flag, names = _flag(field.name), ", ".join(field.metadata["presets"])
    return (
        f"{flag} NAME is a preset: {names}. By default {field.metadata['name']}; "
        f"{flag}.FIELD overrides one field."
    )


def _chosen(config: Any, given: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Field -> its preset, and the arguments without the presets' names."""
    chosen = {}
    for field in _presets(config):
        flag, known = _flag(field.name), field.metadata["presets"]
        chosen[field.name] = field.default
        name, given = _taken(given, flag)
        while name is not None:
            if not name or name.startswith("-"):
                _stop(f"{flag} needs a name: one of {', '.join(known)}.")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                near = f" Did you mean {close[0]!r}?" if close else ""
                _stop(f"{flag} {name}: must be one of {', '.join(known)}.{near}")
            chosen[field.name] = known[name]
            name, given = _taken(given, flag)
    return chosen, given


def _flattened(config: Any, chosen: Mapping[str, Any]) -> Any:
    """The config's class with the presets' fields of plain types, for tyro."""
    parts = []
    for field in _presets(config):
        flat = _flat_default(chosen[field.name], field.metadata["without"])
        default = dataclasses.field(default=flat)
        parts.append((field.name, type(flat), default))
    # The config checks itself when it is made of its own classes, by `_rebuilt`.
    unchecked = {"__post_init__": lambda self: None}
    return dataclasses.make_dataclass(
        config.__name__, parts, bases=(config,), namespace=unchecked, frozen=True
    )


def _flat_default(own: Any, without: Collection[str] = ()) -> Any:
    """A dataclass with the plain fields of another, and of those inside it."""
    hints = typing.get_type_hints(type(own))
    fields = []
    for each in dataclasses.fields(own):
        if not each.init or each.name in without:
            continue
        hint, value = _plain(hints[each.name]), getattr(own, each.name)
        if dataclasses.is_dataclass(value):
            value = _flat_default(value)
            hint = type(value)
        elif hint is None or not _is_plain(value):
            continue
        fields.append((each.name, hint, dataclasses.field(default=value)))
    kind = type(own)
    flat: Any = dataclasses.make_dataclass(
        kind.__name__, fields, frozen=True, kw_only=True
    )
    flat.__doc__ = kind.__doc__
    return flat()


def _with_fields(own: Any, flat: Any) -> Any:
    """A dataclass with the values of its flat one."""
    values = {f.name: getattr(flat, f.name) for f in dataclasses.fields(flat)}
    inner = {k: x for k, x in values.items() if dataclasses.is_dataclass(x)}
    made = {k: _with_fields(getattr(own, k), x) for k, x in inner.items()}
    return dataclasses.replace(own, **{**values, **made})


def _rebuilt(config: Any, chosen: Mapping[str, Any], flat: Any) -> Any:
    """A config of its own class, from one of the class that tyro has read."""
    values = {f.name: getattr(flat, f.name) for f in dataclasses.fields(config)}
    for name, own in chosen.items():
        try:
            values[name] = _with_fields(own, values[name])
        except (ValueError, TypeError) as error:
            _stop(f"{_flag(name)}: {error}")
    try:
        return config(**values)
    except (ValueError, TypeError) as error:
        _stop(str(error))


def _plain(hint: Any) -> Any:
    """A type without what no flag can have; None if nothing is left."""
    if hint in (int, float, bool, str, types.NoneType):
        return hint
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return hint
    if origin is tuple and all(a is Ellipsis or _plain(a) is not None for a in args):
        return hint
    if origin in (typing.Union, types.UnionType):
        left = [each for each in map(_plain, args) if each is not None]
        return functools.reduce(operator.or_, left) if left else None
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | bool | str)


def _with_file(config: Any, given: list[str]) -> list[str]:
    """The arguments, with ``--config FILE`` replaced by the file's flags, first."""
    file, others = _taken(given, "--config")
    if file is None:
        return given
    try:
        settings = _read(Path(file))
    except (OSError, ValueError) as error:
        _stop(f"--config {file}: {error}")
    # What is searched for is not what the file has found before.
    dropped = SEARCHED if _taken(others, "--mesh")[0] == "auto" else ()
    settings = {k: v for k, v in settings.items() if k not in dropped}
    flags: list[str] = []
    for field in _presets(config):
        own = settings.get(field.name)
        if isinstance(own, Mapping):
            del settings[field.name]
            flags += _preset_flags(field, own, others)
    return [*flags, *_flags(settings, "--"), *others]


def _preset_flags(
    field: dataclasses.Field, fields: Mapping[str, Any], others: Sequence[str]
) -> list[str]:
    """The flags of a preset's fields in a file; none if another preset is asked for."""
    flag = _flag(field.name)
    if any(word.partition("=")[0] == flag for word in others):
        return []
    hidden = {"kind", *field.metadata["without"]}
    kind = [flag, fields["kind"]] if "kind" in fields else []
    plain = {k: v for k, v in fields.items() if k not in hidden}
    return [*kind, *_flags(plain, f"{flag}.")]


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
        if value == HIDDEN or (isinstance(value, list) and HIDDEN in value):
            continue  # The default, or what is given beside the file.
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
