"""How is a dataclass read from JSON that anybody may have written?"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxpar.launch.own_files import read

T = TypeVar("T")

_MOST_BYTES = 16 << 20
"""Largest size of such a file."""


def read_record(kind: type[T], path: Path) -> T | None:
    """Read a dataclass from a file that others replace.

    Args:
      kind: a dataclass of int, float, bool, str, None, Literal, lists, dicts and other
        such dataclasses.
      path: of the file.

    Returns:
      The dataclass; None if there is no file, or it does not hold one.

    Raises:
      OSError: if the disk does not recover.
    """
    try:
        return as_kind(kind, json.loads(read(path, at_most=_MOST_BYTES) or b"null"))
    except (ValueError, TypeError, RecursionError):
        return None


def as_kind(kind: Any, value: Any) -> Any:
    """A value of JSON as a type has it; keys of dicts may be int, floats whole numbers.

    Raises:
      ValueError: if it is of another type, or a number or text that can't be used.
      TypeError: if a field of a dataclass is missing or unknown.
    """
    if kind in (int, str):  # Most of what is read, by far: thousands of hosts.
        return _as_plain(kind, value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (kind,) = (each for each in args if each is not type(None))
        return as_kind(kind, value)
    if origin is typing.Literal and value in args:
        return value
    if origin in (list, tuple) and type(value) is list:
        return origin(as_kind(args[0], each) for each in value)
    if origin in (dict, Mapping) and type(value) is dict:
        return {args[0](key): as_kind(args[1], each) for key, each in value.items()}
    if dataclasses.is_dataclass(kind) and type(value) is dict:
        hints, make = typing.get_type_hints(kind), typing.cast(Any, kind)
        return make(**{k: as_kind(hints.get(k), v) for k, v in value.items()})
    return _as_plain(kind, value)


def _as_plain(kind: Any, value: Any) -> Any:
    is_usable = type(value) is not int or abs(value) < 2**63
    if kind is float and type(value) is int and is_usable:
        value = float(value)
    if type(value) is not kind or not is_usable:
        raise ValueError(f"{str(value)[:40]!r} is not {kind}")
    if type(value) is str:
        value.encode()  # Half a character can't be printed.
    return value
