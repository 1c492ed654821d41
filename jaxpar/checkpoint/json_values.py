"""Which values can be stored next to the arrays of a checkpoint: those of JSON."""

import json
from typing import Any


def as_json(argument: str, value: Any) -> Any:
    """Check that a value survives JSON, and return it as JSON returns it."""
    try:
        _require_str_keys(value)
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{argument} must be made of None, bool, int, float, str, and lists and "
            f"dicts of them with str keys: {error}"
        ) from error


def _require_str_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"it has the key {key!r}")
            _require_str_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_str_keys(item)
