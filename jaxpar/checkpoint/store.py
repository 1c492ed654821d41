"""How a run saves its state, and how any other run takes it up again."""

import atexit
import dataclasses
import operator
import os
import threading
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxpar.checkpoint import folder as files
from jaxpar.checkpoint import leaves as named
from jaxpar.checkpoint.json_values import as_json
from jaxpar.checkpoint.logs import quiet_orbax
from jaxpar.checkpoint.processes import from_first, gather

_WRITERS_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back.

    Attributes:
        step: The step that was restored.
        tree: The tree of target, with the stored values and target's shardings.
        meta: The mapping that was saved with it, as JSON gives it back.
        data_states: The data state of every process that saved.
    """

    step: int
    tree: Any
    meta: dict[str, Any]
    data_states: list[Any]

    @property
    def data_state(self) -> Any:
        """The data state for this process to go on from; None if none was saved.

        Raises:
            ValueError: If another number of processes saved differing data states.
        """
        saved, now = len(self.data_states), jax.process_count()
        if saved == now:
            return self.data_states[jax.process_index()]
        if all(state == self.data_states[0] for state in self.data_states):
            return self.data_states[0]
        raise ValueError(
            f"the data states of step {self.step} are of {saved} processes, each "
            f"another, and this run has {now}: the order of the data can't go on. "
            f"Restore with {saved} processes, or leave the data state out and start "
            "the data anew"
        )


class Checkpoints:
    """Sharded, asynchronous checkpoints of one run in one folder.

    A checkpoint holds a tree's arrays by path name, the position in the data and a
    small mapping. It restores bit for bit onto any other mesh, sharding and number of
    processes. A folder belongs to one run: to save into a folder that already has
    checkpoints, restore from it first. All processes call every method, and see the
    same folder.

    Call wait() before the program ends: a save that is still under way then is lost,
    with a warning.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3):
        """Name the folder; nothing is read or written yet.

        Args:
            folder: Where the checkpoints are or will be, on a file system.
            keep: How many of the newest checkpoints stay; None keeps all.

        Raises:
            ValueError: If keep is below 1, or folder is a URL.
        """
        if "://" in os.fspath(folder):
            raise ValueError(
                f"folder is {os.fspath(folder)!r}; it must be a path on a file system: "
                "mount the bucket and give the path where it is mounted"
            )
        self._folder = Path(folder).expanduser().absolute()
        self._keep: int | None = None
        self._run: str | None = None
        self._manager: ocp.CheckpointManager | None = None
        self.set_keep(keep)

    def set_keep(self, keep: int | None) -> None:
        """Choose how many of the newest checkpoints stay at the saves that follow."""
        if keep is not None and keep < 1:
            raise ValueError(
                f"keep is {keep}; it must be at least 1, or None to keep all"
            )
        if keep != self._keep:
            self.close()
            self._keep = keep

    def save(
        self,
        step: int,
        tree: Any,
        *,
        data_state: Any = None,
        meta: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Start to save a step; return when the arrays are copied to the host.

        The arrays may be donated or deleted as soon as this returns. The step counts as
        saved when wait() has returned. A save that is still under way is waited for
        first. A step that this run has already saved is left as it is.

        Args:
            step: The number of the step, at least 0.
            tree: Nested tree of jax.Array, typed PRNG keys included.
            data_state: This process's position in the data: None, bool, int, float,
                str, and lists and dicts of them with str keys.
            meta: What else to remember, of the same kinds.
            force: Take over a folder that holds checkpoints of another run with the
                same leaves, and go on from its newest step.

        Raises:
            TypeError: If step, a leaf, data_state or meta is of a wrong type.
            ValueError: If the folder's checkpoints have other leaves, are of another
                run, or are newer than step. Nothing is written then.
            NotADirectoryError: If the folder is a file.
            PermissionError: If the folder can't be written.
        """
        step = _checked_step(step)
        leaves = named.named_leaves(tree, "tree")
        named.require_global(leaves)
        data_state = as_json("data_state", data_state)
        meta = as_json("meta", dict(meta or {}))
        self.wait()
        specs = named.leaf_specs(leaves)
        states = gather(data_state)
        run = from_first(lambda: self._admit(step, specs, force))
        if run is None:
            return
        self._run = run
        content = {
            "format": files.FORMAT,
            "run": run,
            "leaves": {name: dataclasses.asdict(spec) for name, spec in specs.items()},
            "meta": meta,
        }
        # Orbax refuses arrays without elements; the table of leaves is enough for them.
        arrays = {n: named.to_stored(leaf) for n, leaf in leaves.items() if leaf.size}
        self._open().save(
            step,
            args=ocp.args.Composite(
                **{
                    files.STATE: ocp.args.StandardSave(arrays),
                    files.DATA: ocp.args.JsonSave({"states": states}),
                    files.META: ocp.args.JsonSave(content),
                }
            ),
            force=True,
        )
        _unfinished.add(self)

    def wait(self) -> None:
        """Return when every save is on disk; raise the error of one that failed.

        Raises:
            OSError, ValueError, RuntimeError: Whatever made the save fail, such as a
                full disk; a note names the folder. Earlier checkpoints are whole, and
                the next save starts afresh.
        """
        _unfinished.discard(self)
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            newest = self.latest()
            error.add_note(
                f"A save to {str(self._folder)!r} failed. The newest checkpoint there "
                f"is {'none' if newest is None else f'step {newest}'}; make room or "
                "mend the disk, and save again."
            )
            _let_writers_end()
            self._release()
            raise

    def steps(self) -> list[int]:
        """Return the steps on disk that are whole, oldest first."""
        return sorted(files.complete_steps(self._folder))

    def latest(self) -> int | None:
        """Return the newest step on disk that is whole, None if there is none."""
        return next(files.complete_steps(self._folder), None)

    def restore(self, target: Any, *, step: int | None = None) -> Restored:
        """Read a checkpoint into the shapes, dtypes and shardings of target.

        Waits for a save under way. After it, this object goes on with the run whose
        checkpoint it was: it may save into the folder.

        Args:
            target: Tree with the leaves of the one that was saved, as
                jax.ShapeDtypeStruct with a sharding each, or as jax.Array. Its
                shardings may be others than those at the time of saving.
            step: The step to restore; None for the newest one that is whole.

        Returns:
            The restored tree, with the step, the data state and the meta.

        Raises:
            FileNotFoundError: If the folder has no such checkpoint, or none at all.
            ValueError: If target's leaves differ from the stored ones in name, shape or
                dtype, or have no sharding. Nothing is loaded then.

        Warns:
            UserWarning: If newer steps were skipped because they are incomplete.
        """
        targets = named.named_leaves(target, "target")
        named.require_shardings(targets)
        self.wait()
        found = from_first(lambda: files.read_step(self._folder, step))
        content = found["content"]
        difference = named.describe_mismatch(
            named.leaf_specs(targets), _specs_of(content)
        )
        path = files.step_path(self._folder, found["step"])
        if difference:
            raise ValueError(
                f"target does not match checkpoint {str(path)!r}, which is of another "
                f"model or optimizer:\n{difference}\nBuild the same model and "
                "optimizer, or restore from another folder"
            )
        try:
            arrays = _load(path, targets)
        except (OSError, ValueError, RuntimeError) as error:
            error.add_note(
                f"Reading the arrays of {str(path)!r} failed. If the folder is "
                f"damaged, restore another step of {self.steps()}."
            )
            raise
        self._run = content["run"]
        tree = jax.tree.unflatten(jax.tree.structure(target), arrays)
        return Restored(found["step"], tree, content["meta"], found["data"])

    def close(self) -> None:
        """Wait for saves under way and release the threads; saving again reopens."""
        self.wait()
        self._release()

    def _release(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _admit(
        self, step: int, specs: Mapping[str, named.LeafSpec], force: bool
    ) -> str | None:
        """Return the run to save a step under, None if this run has saved it."""
        files.make_writable(self._folder)
        newest = self.latest()
        run = self._run or uuid.uuid4().hex
        if newest is not None:
            content = files.read_meta(files.step_path(self._folder, newest))
            difference = named.describe_mismatch(specs, _specs_of(content))
            if difference:
                raise ValueError(
                    f"folder {str(self._folder)!r} holds checkpoints of another model "
                    f"or optimizer; those of step {newest} differ:\n{difference}\n"
                    "Nothing was written. Save to another folder"
                )
            if content["run"] != run and not force:
                raise ValueError(
                    f"folder {str(self._folder)!r} holds another run, up to step "
                    f"{newest}. Nothing was written. Save to another folder, restore "
                    "from this one to go on with its run, or pass force=True to "
                    "continue it from the state at hand"
                )
            if content["run"] == run and step in self.steps():
                return None
            if step <= newest:
                raise ValueError(
                    f"step is {step}, and folder {str(self._folder)!r} already has "
                    f"step {newest}: a step must be newer than those saved. Save to "
                    f"another folder, or move the steps from {step} on away"
                )
        if self._manager is None:
            names = files.set_aside_incomplete(self._folder)
            if names:
                warnings.warn(
                    f"incomplete checkpoints in {str(self._folder)!r} were renamed to "
                    f"end in '.incomplete': {', '.join(names)}",
                    stacklevel=5,
                )
        return run

    def _open(self) -> ocp.CheckpointManager:
        """Return the Orbax manager, made at the first save."""
        if self._manager is None:
            quiet_orbax()
            self._manager = ocp.CheckpointManager(
                self._folder,
                options=ocp.CheckpointManagerOptions(
                    step_prefix=files.STEP_PREFIX,
                    step_format_fixed_length=files.STEP_DIGITS,
                    preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
                    create=False,
                    cleanup_tmp_directories=True,
                ),
                item_handlers={
                    files.STATE: ocp.StandardCheckpointHandler(),
                    files.DATA: ocp.JsonCheckpointHandler(files.DATA_FILE),
                    files.META: ocp.JsonCheckpointHandler(files.META_FILE),
                },
            )
        return self._manager


def _let_writers_end() -> None:
    """Join the threads of a failed save.

    Orbax reports the first error and leaves the other threads writing into the step's
    temporary folder, which is the one that a second try to save the step uses.
    """
    until = time.monotonic() + _WRITERS_SECONDS
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            # Orbax's own join raises the thread's error, which is known by now.
            threading.Thread.join(thread, max(0.0, until - time.monotonic()))


def _load(path: Path, targets: Mapping[str, Any]) -> list[jax.Array]:
    """Read every leaf of targets from a step's folder, each onto its sharding."""
    structs = {
        name: named.stored_struct(target)
        for name, target in targets.items()
        if target.size
    }
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        arrays = reader.restore(
            path / files.STATE, args=ocp.args.StandardRestore(structs)
        )
    return [
        named.from_stored(
            arrays[name] if name in arrays else _without_elements(target), target
        )
        for name, target in targets.items()
    ]


def _without_elements(target: Any) -> jax.Array:
    struct = named.stored_struct(target)
    return jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)


def _specs_of(content: Mapping[str, Any]) -> dict[str, named.LeafSpec]:
    return {
        name: named.LeafSpec(tuple(leaf["shape"]), leaf["dtype"])
        for name, leaf in content["leaves"].items()
    }


def _checked_step(step: int) -> int:
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step is {number}; it must be at least 0")
    return number


_unfinished: set[Checkpoints] = set()


@atexit.register
def _warn_of_lost_saves() -> None:
    """Say what was lost when the program ends before a save has finished.

    Orbax starts threads until the end of a save, and since Python 3.12 an interpreter
    that goes down starts none: such a save fails, and the exit code is still 0.
    """
    for checkpoints in tuple(_unfinished):
        try:
            checkpoints.wait()
        except (OSError, ValueError, RuntimeError) as error:
            warnings.warn(
                "the program ended before a checkpoint was saved: call wait() before "
                f"it ends. {error}. {' '.join(getattr(error, '__notes__', ()))}",
                stacklevel=1,
            )
