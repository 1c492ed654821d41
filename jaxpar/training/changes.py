"""How is a checkpoint taken up by a run whose settings have changed since?

A rate that a checkpoint holds gives way to the new one, another optimizer begins anew,
and the data goes on at its row.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.former_names import as_stored
from jaxpar.checkpoint.leaves import leaf_specs
from jaxpar.checkpoint.places import place_of
from jaxpar.engine.engine import Engine
from jaxpar.tree import named_leaves

_STATE = "opt_state/"
_INJECTED = "hyperparams"
"""Where `optax.inject_hyperparams` keeps numbers; it would use those restored."""


class ChangedData:
    """Hands a position to data that may be another than the saved position's.

    Args:
      data: an iterator with ``set_state``; one with ``leave_out`` takes ``change=``.
    """

    def __init__(self, data: Any):
        self._data = data

    def set_state(self, state: Any) -> None:
        """Move to the position, or to the start of another stream."""
        takes_change = hasattr(self._data, "leave_out")
        self._data.set_state(state, **({"change": True} if takes_change else {}))


def restore_changed(
    engine: Engine, folder: Path | str, step: int, data: Any, *, new_optimizer: bool
) -> list[str]:
    """Restore a checkpoint of other settings.

    Args:
      engine: of the new settings.
      folder: the run's checkpoints.
      step: the newest valid one.
      data: takes the position; None to leave it.
      new_optimizer: whether the run asks for another kind of optimizer; one whose
        state has other leaves is another in any case.

    Returns:
      Leaves of the optimizer's state that begin anew; none for the same optimizer.
    """
    stored = place_of(folder).step(step).manifest().leaves
    own = leaf_specs(named_leaves(engine.placement.structs()))
    names = as_stored({name: name for name in own}, engine.placement.former, stored)
    renamed = {there: name for name, there in names.items()}
    stored = {renamed.get(name, name): spec for name, spec in stored.items()}
    anew, counts = leaves_to_reset(stored, own, new_optimizer=new_optimizer)
    given = None if data is None else ChangedData(data)
    engine.restore(folder, data=given, reset=anew, rename=counts)
    return [name for name in anew if not is_injected(name)]


def leaves_to_reset(
    stored: Mapping[str, Any], own: Mapping[str, Any], *, new_optimizer: bool
) -> tuple[list[str], dict[str, str]]:
    """Which leaves of an optimizer's state are not taken from a checkpoint.

    Args:
      stored: leaf -> shape and dtype, in the checkpoint.
      own: likewise, of the engine's state.
      new_optimizer: whether it is another one though its leaves are the same.

    Returns:
      (names, count of a schedule here -> its name there). Of the same optimizer, only
      the numbers that were injected into it are reset; of another one all leaves but
      the count of its schedule.
    """
    mine = {name: spec for name, spec in own.items() if name.startswith(_STATE)}
    there = {name: spec for name, spec in stored.items() if name.startswith(_STATE)}
    if mine == there and not new_optimizer:
        return [name for name in mine if is_injected(name)], {}
    counts = schedule_counts(mine)
    same = [name for name in counts if name in there]
    # What reads an injected schedule is its own count, not the wrapper's.
    others = sorted(set(counts) - set(same), key=lambda name: _INJECTED not in name)
    free = [name for name in schedule_counts(there) if name not in same]
    renamed = dict(zip(others, free, strict=False))
    return [name for name in mine if name not in {*same, *renamed}], renamed


def is_injected(name: str) -> bool:
    """Whether a leaf is a number that `optax.inject_hyperparams` keeps."""
    return _INJECTED in name.split("/")


def schedule_counts(names: Iterable[str]) -> list[str]:
    """Counts that a schedule is read at, not those that correct moments' bias.

    A schedule's count stands alone, or beside the state that it wraps.

    Example:
      >>> schedule_counts(["state/0/count", "state/0/mu/w", "state/2/count"])
      ['state/2/count']
    """
    names = list(names)
    found = []
    for name in names:
        head, _, last = name.rpartition("/")
        siblings = {
            other.removeprefix(f"{head}/").split("/")[0]
            for other in names
            if other.startswith(f"{head}/")
        }
        wrapped = {"count", _INJECTED, f"{_INJECTED}_states", "inner_state"}
        if last == "count" and siblings <= wrapped:
            found.append(name)
    return found
