"""May a step be saved into a folder? It belongs to one run, whose steps grow."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxpar.checkpoint import leaves as named
from jaxpar.checkpoint.former_names import as_stored
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.checkpoint.shard_parts import ShardParts


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who saves into a folder.

    Attributes:
      run: that saves.
      former: leaf -> its names in older checkpoints.
      parts: which parts of a state are per shard, or not saved.
      force: whether it may be another run than the one that has saved there.
    """

    run: str
    former: Mapping[str, Sequence[str]]
    parts: ShardParts
    force: bool = dataclasses.field(kw_only=True)

    def require(
        self,
        folder: str,
        content: Manifest,
        specs: Mapping[str, named.LeafSpec],
        *,
        has_changed: bool,
    ) -> bool:
        """Refuse a folder of another run, unless forced.

        Args:
          folder: of the checkpoints, for messages.
          content: of its newest complete step.
          specs: of the leaves to save.
          has_changed: whether other leaves are meant to go on from that step.

        Returns:
          Whether this run has saved that step.

        Raises:
          ValueError: if its leaves differ, or another run has saved them.
        """
        newest = content.step
        there = as_stored({n: n for n in specs}, self.former, content.leaves)
        own = {there[name]: spec for name, spec in specs.items()}
        logical = (self.parts.logical(x, content.meta) for x in (own, content.leaves))
        difference = named.describe_mismatch(*logical)
        if difference and not has_changed:
            raise ValueError(
                f"folder {folder!r} holds checkpoints of another model "
                f"or optimizer; those of step {newest} differ:\n{difference}\n"
                "Nothing was written. Save to another folder, or restore from this "
                "one with reset= first, to go on with these leaves"
            )
        if content.run != self.run and not self.force:
            raise ValueError(
                f"folder {folder!r} holds another run, up to step "
                f"{newest}. Nothing was written. Save to another folder, or restore "
                "from this one first, to go on with its run"
            )
        return content.run == self.run


def require_newer(folder: str, step: int, newest: int) -> None:
    """Refuse a step that is not newer than all that are saved.

    Raises:
      ValueError: if it is not.
    """
    if step <= newest:
        raise ValueError(
            f"step is {step}, and folder {folder!r} already has "
            f"step {newest}: a step must be newer than those saved. Save to "
            f"another folder, or move the steps from {step} on away"
        )
