"""At which row of its stream does a loader go on, given the state of one?"""

from collections.abc import Mapping
from typing import Any

_POSITION = ("rows", "position")
_BATCHES_ONLY = {"batch_size", "lengths", "steps"}
"""Entries of a stream that its rows don't depend on."""


def row_to_go_on_at(
    state: Mapping[str, Any], stream: Mapping[str, Any], *, change: bool
) -> int:
    """Find the row that follows a saved state.

    Args:
      state: "rows", and the former stream; or "position", in batches, as states had it
        until November 2026.
      stream: what the batches of the present loader depend on.
      change: accept another stream, which starts at row 0; with only another batch
        size, the row is the same.

    Raises:
      ValueError: if the state lacks an entry or is of another stream, and `change` is
        False.

    Example:
      >>> state = {"rows": 12, "batch_size": 4, "seed": 0}
      >>> row_to_go_on_at(state, {"batch_size": 2, "seed": 0}, change=True)
      12
      >>> row_to_go_on_at(state, {"batch_size": 2, "seed": 1}, change=True)
      0
    """
    row, former = _rows_of(state), _without_position(state)
    if not change:
        _require_same(row, former, stream)
    changed = {
        name
        for name in {*former, *stream}
        if name not in former or name not in stream or former[name] != stream[name]
    }
    return 0 if row is None or changed - _BATCHES_ONLY else row


def _rows_of(state: Mapping[str, Any]) -> int | None:
    if "position" in state and "batch_size" in state:
        return state["position"] * state["batch_size"]
    return state.get("rows")


def _without_position(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in _POSITION}


def _require_same(
    row: int | None, former: Mapping[str, Any], stream: Mapping[str, Any]
) -> None:
    missing = ["rows"] if row is None else []
    missing += [name for name in stream if name not in former]
    if missing:
        raise ValueError(
            f"state lacks {', '.join(missing)}; give what get_state() returned, or "
            "change=True to start this stream from the beginning."
        )
    changed = [
        f"{name} was {former[name]!r} and is {value!r}"
        for name, value in stream.items()
        if former[name] != value
    ]
    changed += [f"{name} was {former[name]!r}" for name in former if name not in stream]
    if changed:
        raise ValueError(
            f"state is of another stream of batches: {'; '.join(changed)}. Make the "
            "Loader with the former values, or call set_state(state, change=True): "
            "with another batch_size it goes on at the same row, and another stream "
            "starts from the beginning."
        )
