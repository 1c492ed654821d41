"""How does a run save its state, and how does any run restore it?"""

import atexit
import concurrent.futures
import functools
import itertools
import os
import uuid
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from jaxpar.checkpoint import leaves as named
from jaxpar.checkpoint.json_values import as_json
from jaxpar.checkpoint.manifest import DamagedError, Manifest
from jaxpar.checkpoint.outcome import SaveOutcome
from jaxpar.checkpoint.ownership import Owner, require_newer
from jaxpar.checkpoint.places import place_of
from jaxpar.checkpoint.processes import from_first, gather, on_all
from jaxpar.checkpoint.restoring import Request, Restored
from jaxpar.checkpoint.retention import Keep, as_keep
from jaxpar.checkpoint.saving import (
    REREAD,
    ReadBack,
    SaveFailedError,
    checked_step,
    failure,
    finite,
    of_all,
    start,
    versions,
)
from jaxpar.checkpoint.selection import select
from jaxpar.checkpoint.shard_parts import ShardParts
from jaxpar.checkpoint.slices import checksums
from jaxpar.checkpoint.turns import one_at_a_time
from jaxpar.tree import to_stored

_ALL_LOGICAL = ShardParts()


class Checkpoints:
    """Sharded, asynchronous, verified checkpoints of one run in one folder.

    A checkpoint holds a tree's arrays by path name, the position in the data and a
    small mapping, and a manifest with checksums. It restores bit for bit onto any other
    mesh, sharding and number of processes. A folder belongs to one run: to save into a
    folder that already has checkpoints, restore from it first. All processes call every
    method, and mount the same folder.

    Call wait() before the program ends: otherwise a save in progress is lost, with a
    warning.

    Args:
      folder: where the checkpoints are or will be: a path, or a URL as
        "s3://bucket/folder". Nothing is read or written yet.
      keep: checkpoints to keep: a `Keep`, how many of the newest, or None for all.
      former: leaf -> its names in older checkpoints (`former_names`).
      parts: which parts of a state are per shard, or not saved.

    Attributes:
      run: whose steps this saves; None for a new one, if the folder has none.

    Raises:
      ValueError: if keep is below 1, or folder is a URL of another kind.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | Keep | None = 3,
        former: Mapping[str, Sequence[str]] = MappingProxyType({}),
        parts: ShardParts = _ALL_LOGICAL,
    ):
        self._place = place_of(folder)
        self._folder = str(self._place)
        self._former, self._parts = former, parts
        self.set_rules(keep, REREAD)
        self.run: str | None = None
        self._reset_at: int | None = None
        self._damaged: set[int] = set()
        self._turn, self._begun = 0, -1
        self._saving: concurrent.futures.Future[None] | None = None
        self._numbers = itertools.count()

    def set_rules(self, keep: int | Keep | None, reread: float) -> None:
        """Set what later saves keep, and the share of their slices they read back.

        Raises:
          ValueError: if keep is below 1, or reread not from 0 to 1.
        """
        if not 0 <= reread <= 1:
            raise ValueError(f"reread={reread} must be from 0 to 1; 1 reads all back.")
        self._keep, self._reread = as_keep(keep), reread

    @one_at_a_time
    def save(
        self,
        step: int,
        tree: Any,
        *,
        data_state: Any = None,
        meta: Mapping[str, Any] | None = None,
        metric: float | None = None,
        force: bool = False,
    ) -> None:
        """Start to save a step; return when the arrays are copied to the host.

        The arrays may be donated or deleted as soon as this returns. The step is saved
        when wait() has returned: it is then written, synced, verified and renamed. A
        save in progress is waited for first. A step that this run has already saved is
        left unchanged.

        Args:
          step: the number of the step, at least 0.
          tree: nested tree of jax.Array, typed PRNG keys included.
          data_state: this process's position in the data: None, bool, int, float, str,
            and lists and dicts of them with str keys.
          meta: other values to store, of the same types.
          metric: of the step, smaller is better, for `Keep.best`.
          force: use a folder that holds checkpoints of another run with the same
            leaves, and continue from its newest step.

        Raises:
          TypeError: if step, a leaf, data_state or meta is of a wrong type.
          ValueError: if the folder's checkpoints have other leaves, are of another run,
            or are newer than step. Nothing is written then.
          NotADirectoryError: if the folder is a file.
          PermissionError: if the folder can't be written.
          OSError: if the disk has no room for it. Nothing is written then.
        """
        step = checked_step(step)
        leaves = self._parts.saved(named.array_leaves(tree, "tree"))
        named.require_global(leaves)
        state = as_json("data_state", data_state)
        number = self._place.lease()
        content = as_json("meta", {**self._parts.meta(), **number, **(meta or {})})
        self.wait()
        specs = named.leaf_specs(leaves)
        count = next(self._numbers)
        admitted = from_first(lambda: self._admit(step, specs, count, force))
        if admitted is None:
            return
        run, objects = admitted
        self.run, self._damaged = run, set()  # They are renamed by now.
        # Orbax rejects arrays without elements, of which the table of leaves suffices.
        held = {n: to_stored(leaf) for n, leaf in leaves.items() if leaf.size}
        own = checksums(held)
        manifest = Manifest(
            step=step,
            run=run,
            leaves=specs,
            data_states=gather(state),
            meta=content,
            metric=finite(metric),
            versions=versions(),
            slices=of_all(own),
            objects=objects,
        )
        self._turn, self._begun = self._turn + 1, step
        read_back = ReadBack(own, self._reread, self._turn)
        self._outcome = SaveOutcome(next(_saves), step)
        given = self._outcome, count, held, manifest, self._keep, read_back
        self._saving = start(self._outcome, *self._place.save(*given))
        _unfinished[self] = None

    @one_at_a_time
    def wait(self) -> None:
        """Return when every save is verified on disk; raise what made one fail.

        This includes saves that other objects of this program have started in the
        folder.

        Raises:
          SaveFailedError: if one failed, as on a full disk. Earlier checkpoints are
            complete, and the next save starts anew.
          LeaseLostError: if another process has taken the run over.
        """
        for other in [each for each in _unfinished if each is not self]:
            if other._place == self._place:
                other.wait()
        _unfinished.pop(self, None)
        saving, self._saving = self._saving, None
        if saving is None:
            return
        error = saving.exception()
        failed = gather(None if error is None else repr(error)[:1000])
        self._outcome.close()
        if not any(failed):
            return
        self._damaged.add(self._begun)  # Another process may have given it its name.
        self._release()
        raise failure(self._folder, failed, error, self.latest()) from error

    def has_failed(self, step: int) -> bool:
        """Whether the save in progress has failed, in whichever process.

        Args:
          step: of the caller, who asks after each: all processes learn of it at the
            same one, seconds after the failure. `wait` then raises at once.
        """
        return self._saving is not None and self._outcome.has_failed(step)

    def steps(self) -> list[int]:
        """Return the complete steps on disk, oldest first."""
        return sorted(set(self._place.complete()) - self._damaged)

    def latest(self) -> int | None:
        """Return the newest complete step on disk, None if there is none."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """Return the mapping that was saved with a step.

        Raises:
          DamagedError: if the step has no valid manifest.
        """
        return self._place.step(step).manifest().meta

    @one_at_a_time
    def restore(
        self,
        target: Any,
        *,
        step: int | None = None,
        only: Sequence[str] | None = None,
        reset: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
    ) -> Restored:
        """Read a checkpoint into the shapes, dtypes and shardings of target.

        Every slice that is read is compared in memory with what the devices held at
        the save, by the process that uses it; other files are verified first, and all
        of a checkpoint of older versions. Waits for a save in progress.
        Afterwards this object continues the run of that checkpoint: it may save into
        the folder, with `reset` also another optimizer's leaves.

        Args:
          target: tree with the leaves of the saved one, as jax.ShapeDtypeStruct with a
            sharding each, or as jax.Array. Its shardings may differ from those of the
            save.
          step: the step to restore; None for the newest valid one.
          only: patterns of the leaves to read, such as ["params/*"]; None for all.
          reset: patterns of leaves not to read, such as ["opt_state/*"].
          rename: leaf of target -> its name in the checkpoint; both may end in "/*".

        Returns:
          The restored tree, with the step, the data state and the meta.

        Raises:
          FileNotFoundError: if the folder has no such checkpoint, or none at all.
          DamagedError: if it is damaged, or all are; the message names the files.
          ValueError: if target's leaves differ from the stored ones in name, shape or
            dtype, or have no sharding. Nothing is loaded then.

        Warns:
          UserWarning: if newer steps were skipped because they are damaged, or a part
            that is per shard can't be read here.
        """
        targets = named.array_leaves(target, "target")
        named.require_shardings(targets)
        wanted = select(targets, only=only, reset=reset, rename=rename or {})
        self.wait()
        partly = only is not None or bool(reset)
        request = Request(targets, wanted, self._former, self._parts, partly=partly)
        damaged: dict[int, str] = {}
        while True:
            choose = functools.partial(self._place.choose, step, damaged)
            there = self._place.step((found := from_first(choose))["step"])
            try:
                manifest, read = on_all(functools.partial(request.read, there))
                break
            except DamagedError as error:
                if step is not None:
                    raise
                damaged[found["step"]] = str(error)
        for part, why in read.anew.items():
            if why:
                warnings.warn(f"{part} starts anew: {why}.", stacklevel=5)
        if skipped := dict(found["skipped"]):
            warnings.warn(
                f"skipped {'; '.join(skipped.values())}: restoring step "
                f"{found['step']}",
                stacklevel=5,
            )
        self.run, self._damaged = manifest.run, set(skipped)
        self._reset_at = found["step"] if reset else None
        return Restored(
            step=found["step"],
            tree=jax.tree.unflatten(jax.tree.structure(target), read.leaves),
            meta=manifest.meta,
            data_states=manifest.data_states,
            skipped=skipped,
            anew=tuple(read.anew),
        )

    @one_at_a_time
    def close(self) -> None:
        """Wait for saves in progress and release the threads; saving again reopens."""
        self.wait()
        self._release()

    def _release(self) -> None:
        self._place.close()

    def _admit(
        self, step: int, specs: Mapping[str, named.LeafSpec], count: int, force: bool
    ) -> tuple[str, str | None] | None:
        """Prepare the folder for a step, by its run's save of a number.

        Returns the run and where its objects go; None if the step is already saved.
        """
        self._place.require_own()
        if self.run:
            self._damaged |= self._place.unreadable_newest(self._damaged)
        newest, run = self.latest(), self.run or uuid.uuid4().hex
        if newest is not None:
            owner = Owner(run, self._former, self._parts, force=force)
            changed = newest == self._reset_at
            content = self._place.step(newest).manifest()
            is_own = owner.require(self._folder, content, specs, has_changed=changed)
            if is_own and step in self.steps():
                return None
            require_newer(self._folder, step, newest)
        needed = sum(spec.num_bytes for spec in specs.values())
        said, objects = self._place.prepare(step, count, needed, self._damaged)
        if said:
            warnings.warn(said, stacklevel=7)
        return run, objects


_saves = itertools.count()
_unfinished: dict[Checkpoints, None] = {}
"""Objects with a save in progress, in starting order: the same on all processes."""


@atexit.register
def _warn_of_lost_saves() -> None:
    """Report what was lost when the program ends before a save has finished.

    Orbax starts threads until the end of a save, and since Python 3.12 an interpreter
    that shuts down starts none: such a save fails, and the exit code is still 0.
    """
    for checkpoints in tuple(_unfinished):
        try:
            checkpoints.wait()
        except SaveFailedError as error:
            warnings.warn(
                "the program ended before a checkpoint was saved: call wait() before "
                f"it ends. {error}.",
                stacklevel=1,
            )
