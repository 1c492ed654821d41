"""Which parts of a state are of each data shard, and when does a checkpoint have them?

Arrays of such a part have the data shards as dim 0. They fit only where the batch axes
are as they were at the save; elsewhere the part starts anew. A run that does not have
the part ignores it.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxpar.checkpoint.leaves import LeafSpec
from jaxpar.mesh import axes_text

KEY = "shard_parts"
"""In the mapping that is stored with a step."""


@dataclasses.dataclass(frozen=True)
class ShardParts:
    """The parts of a state that are per shard, and those that are not saved.

    Attributes:
      axes: batch axis -> devices on it, of axes with several.
      per_shard: paths of the parts that every data shard has its own of, such as
        "carried/reduction".
      unsaved: paths of parts that checkpoints don't hold.
    """

    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    per_shard: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()

    def saved(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves that a checkpoint holds."""
        return {n: x for n, x in leaves.items() if not _part_of(n, self.unsaved)}

    def meta(self) -> dict[str, Any]:
        """What is stored with a step, to compare with at a restore."""
        paths = [path for path in self.per_shard if path not in self.unsaved]
        return {KEY: {"axes": dict(self.axes), "paths": paths}} if paths else {}

    def logical(
        self,
        leaves: Mapping[str, LeafSpec],
        meta: Mapping[str, Any],
        kept: Collection[str] = (),
    ) -> dict[str, LeafSpec]:
        """The leaves that two checkpoints of one run must both have, and those `kept`.

        Not the parts that are per shard, in this run or in the checkpoint with that
        meta, and those that are not saved.
        """
        paths = (*self.per_shard, *self.unsaved, *_stored(meta)["paths"])
        return {
            name: spec
            for name, spec in leaves.items()
            if name in kept or not _part_of(name, paths)
        }

    def anew(
        self,
        wanted: Mapping[str, str],
        specs: Mapping[str, LeafSpec],
        stored: Mapping[str, LeafSpec],
        meta: Mapping[str, Any],
    ) -> dict[str, str]:
        """Find the parts that can't be read, of those that are wanted.

        Args:
          wanted: leaf of this state -> its name in the checkpoint.
          specs: leaf of this state -> its spec.
          stored: leaf of the checkpoint -> its spec.
          meta: that was stored with it.

        Returns:
          Path of a part -> why it starts anew; empty for one that is never saved.
        """
        found, before = {}, _stored(meta)["axes"]
        for path in dict.fromkeys((*self.per_shard, *self.unsaved)):
            own = {n: to for n, to in wanted.items() if _part_of(n, [path])}
            if not own:
                continue
            if path in self.unsaved:
                found[path] = ""
            elif any(stored.get(to) is None for to in own.values()):
                found[path] = "the checkpoint does not hold it"
            elif before != dict(self.axes):
                found[path] = f"it was saved on {_text(before)}, not {_text(self.axes)}"
            elif any(stored[to] != specs[n] for n, to in own.items()):
                found[path] = "its arrays have other shapes there"
        return found


def _stored(meta: Mapping[str, Any]) -> dict[str, Any]:
    return meta.get(KEY, {"axes": {}, "paths": []})


def _part_of(name: str, paths: Collection[str]) -> bool:
    return any(f"{name}/".startswith(f"{path}/") for path in paths)


def _text(axes: Mapping[str, int]) -> str:
    return axes_text(axes) or "one data shard"


def without(wanted: Mapping[str, str], paths: Collection[str]) -> dict[str, str]:
    """The wanted leaves that are not of some parts."""
    return {n: to for n, to in wanted.items() if not _part_of(n, paths)}
