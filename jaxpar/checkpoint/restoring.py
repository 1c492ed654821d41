"""What does a restore return: which leaves, on which shardings?"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpar.checkpoint import leaves as named
from jaxpar.checkpoint.bucket import BucketStep
from jaxpar.checkpoint.former_names import as_stored
from jaxpar.checkpoint.manifest import DamagedError, Manifest
from jaxpar.checkpoint.places import FolderStep
from jaxpar.checkpoint.shard_parts import ShardParts, without
from jaxpar.checkpoint.slices import DifferentError, Slices
from jaxpar.tree import from_stored, stored_struct


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of a restore.

    Attributes:
      step: the step that was restored.
      tree: the tree of target, with the stored values and target's shardings; leaves
        that were not read are target's own.
      meta: the mapping that was saved with it, as JSON returns it.
      data_states: the data state of every process that saved.
      skipped: newer steps that are damaged, with the reasons.
      anew: paths of the parts that start anew (`jaxpar.checkpoint.shard_parts`).
    """

    step: int
    tree: Any
    meta: dict[str, Any]
    data_states: list[Any]
    skipped: dict[int, str]
    anew: tuple[str, ...] = ()

    @property
    def data_state(self) -> Any:
        """The data state from which this process resumes; None if none was saved.

        Raises:
          ValueError: if another number of processes saved different data states.
        """
        saved, now = len(self.data_states), jax.process_count()
        if saved == now:
            return self.data_states[jax.process_index()]
        if self.data_states and all(s == self.data_states[0] for s in self.data_states):
            return self.data_states[0]
        raise ValueError(
            f"the data states of step {self.step} are of {saved} processes and "
            f"differ, but this run has {now}: the order of the data can't continue. "
            f"Restore with {saved} processes, or drop the data state and restart "
            "the data"
        )

    def position(self, folder: str | os.PathLike[str]) -> Any:
        """The position in the data that was saved with the state.

        Raises:
          ValueError: if none was, or as `data_state` does.
        """
        if self.data_state is None:
            raise ValueError(
                f"data: step {self.step} of {os.fspath(folder)!r} holds no position in "
                "the data, because it was saved without data=. Omit data to start it "
                "anew."
            )
        return self.data_state


@dataclasses.dataclass(frozen=True)
class Read:
    """What was read of a step.

    Attributes:
      leaves: in the target's order; those that were not read are the target's own.
      anew: path of a part that starts anew -> why.
    """

    leaves: list[Any]
    anew: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Request:
    """Which leaves a restore reads, of whatever step.

    Attributes:
      targets: leaf -> its shape, dtype and sharding.
      wanted: leaf to read -> its name in a checkpoint of today's names.
      former: leaf -> its names in older checkpoints.
      parts: which parts are per shard, or not saved.
      partly: whether the checkpoint may have more.
    """

    targets: Mapping[str, Any]
    wanted: Mapping[str, str]
    former: Mapping[str, Sequence[str]]
    parts: ShardParts
    partly: bool = dataclasses.field(kw_only=True)

    def read(self, step: FolderStep | BucketStep) -> tuple[Manifest, Read]:
        """Read a step.

        Raises:
          DamagedError: if what is read is not what was saved.
          ValueError: if its leaves differ from the targets.
        """
        manifest, targets = step.manifest(), self.targets
        wanted = as_stored(self.wanted, self.former, manifest.leaves)
        given = named.leaf_specs(targets), manifest.leaves, manifest.meta
        anew = self.parts.anew(wanted, *given)
        wanted = without(wanted, anew)
        stored = self.parts.logical(manifest.leaves, manifest.meta, wanted.values())
        require_same(str(step), targets, wanted, stored, partly=self.partly)
        own = {name: targets[name] for name in wanted}
        found = load(step, own, wanted, manifest.slices)
        leaves = [found.get(name, leaf) for name, leaf in targets.items()]
        return manifest, Read(leaves, anew)


def require_same(
    path: str,
    targets: Mapping[str, Any],
    wanted: Mapping[str, str],
    stored: Mapping[str, named.LeafSpec],
    *,
    partly: bool,
) -> None:
    """Reject a checkpoint whose leaves differ from the requested ones.

    A leaf that is stored under another name may have another floating dtype there: a
    parameter that one run trains in fp32 is frozen in bf16 in the next.
    """
    specs = named.leaf_specs({name: targets[name] for name in wanted})
    there = {
        wanted[name]: _cast_on_reading(spec, stored.get(wanted[name]))
        if wanted[name] != name
        else spec
        for name, spec in specs.items()
    }
    if partly:
        stored = {name: spec for name, spec in stored.items() if name in there}
    difference = named.describe_mismatch(there, stored)
    if difference:
        raise ValueError(
            f"target does not match checkpoint {path!r}, which is of another "
            f"model or optimizer:\n{difference}\nBuild the same model and "
            "optimizer, read only some leaves (only=, reset=, rename=), or restore "
            "from another folder"
        )


def _cast_on_reading(
    spec: named.LeafSpec, stored: named.LeafSpec | None
) -> named.LeafSpec:
    """What is read for a leaf: of the stored dtype, if both are floating."""
    both = (spec, stored) if stored else ()
    if both and all(each.is_floating for each in both):
        return dataclasses.replace(spec, dtype=both[1].dtype)
    return spec


def load(
    step: FolderStep | BucketStep,
    targets: Mapping[str, Any],
    there: Mapping[str, str],
    slices: Mapping[str, Slices],
) -> dict[str, jax.Array]:
    """Read leaves from a verified step, each onto its target's sharding.

    What is read is compared with its checksums in memory, by each process.

    Raises:
      DamagedError: if it differs, or can't be read. An array that a device has no room
        for is none.
    """
    structs = {
        there[name]: stored_struct(target)
        for name, target in targets.items()
        if target.size
    }
    try:
        found = step.read_sharded(structs, slices) if structs else {}
    except DifferentError as error:
        raise DamagedError(f"{str(step)!r} is damaged: {error}") from error
    return {
        name: from_stored(
            found[there[name]] if target.size else named.empty(target), target
        )
        for name, target in targets.items()
    }
