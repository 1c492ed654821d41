"""How is a run's state saved, restored and replaced: what engines do with files.

A checkpoint is of the logical state, which is the same for every mesh and optimizer's
form; `jaxpar.checkpoint` writes and reads it.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxpar.checkpoint import Checkpoints, Keep
from jaxpar.checkpoint.memory_tier import MemoryTier, require_whole
from jaxpar.checkpoint.saving import REREAD
from jaxpar.engine.compiled_step import CompiledStep
from jaxpar.engine.loss_step import LossStep, skipped_steps
from jaxpar.engine.one_thread import OneThread
from jaxpar.engine.run_ahead import RunAhead
from jaxpar.engine.state_view import StateView, placed_params, with_weights
from jaxpar.launch.object_stores import is_url
from jaxpar.step.state import TrainState, filled_in, require_sound
from jaxpar.step.update import StoresApart
from jaxpar.types import Params

_RUN = "checkpoints_of"
"""In what is kept in memory: the run of the checkpoints that it is newer than."""


class SavedState(CompiledStep):
    """The state of an engine, which it saves and restores.

    Attributes:
      mesh: the mesh.
    """

    mesh: jax.sharding.Mesh
    _leaves: list[jax.Array]
    _structure: Any
    _losses: Mapping[str | None, LossStep]
    _checkpoints: dict[str, Checkpoints]
    _view: StateView | None
    _thread: OneThread
    _ahead: RunAhead
    _number: int

    @property
    def steps(self) -> int:
        """Steps taken, including skipped ones; waits for them."""
        return int(self._packed.step)

    def load_params(self, params: Params) -> None:
        """Replace the parameters; the step and the optimizer state are unchanged.

        But for what workers or replicas have moved by on their own: all go on from
        these parameters.

        Args:
          params: arrays by the names of ``engine.state.params``, of the same shapes, in
            any floating dtype, sharded or not (the same on every process). Frozen
            parameters may be among them: all of them, or none.

        Raises:
          ValueError: if leaves are missing, unknown or of another shape.
        """
        self.placement.require_devices("load_params")
        with self._thread.calling("load_params"):
            state = self.placement.unpack(self._packed)
            new = with_weights(state, params, self.placement.structs())
            self._take(self.placement.at_new_params(new))

    def save(
        self,
        folder: str | os.PathLike[str] | MemoryTier,
        *,
        data: Any = None,
        keep: int | Keep | None = 3,
        meta: dict[str, Any] | None = None,
        metric: float | None = None,
        reread: float = REREAD,
    ) -> None:
        """Save the state; returns when it is copied to the host.

        The step is saved once `wait`, or the next save, has returned: it is then
        written, synced, compared with what the devices held, and renamed.

        Args:
          folder: the run's checkpoints, one sub-folder per step; or the memory of its
            hosts, for which keep, metric and reread mean nothing.
          data: an iterator with ``get_state()`` (Grain's, or `jaxpar.data.Loader`),
            whose position is saved as well.
          keep: how many of the newest steps stay on disk, None for all; a
            `jaxpar.Keep` for every k-th and the best as well.
          meta: JSON values to store with the state.
          metric: of this step, lower is better, for `jaxpar.Keep.best`.
          reread: share of the state that each process reads back and compares, another
            part at each save; 1 for all.

        Raises:
          ValueError: if the folder holds another model's checkpoints, or reread is not
            from 0 to 1.
          FloatingPointError: if a parameter is not finite, or anything is NaN.
          OSError: if the disk is full, or an earlier save failed. Steps saved before
            are intact.
        """
        self.placement.require_devices("save")
        with self._alone("save"):
            self._ahead.finish()
            self._settle()
            require_sound(state := self.placement.unpack(self._packed))
            position = None if data is None else data.get_state()
            meta = {"mesh": dict(self.mesh.shape), **(meta or {})}
            if isinstance(folder, MemoryTier):
                meta[_RUN] = self._opened(folder.checkpoints).run
                folder.save(self.steps, state, data_state=position, meta=meta)
                return
            checkpoints = self._opened(folder)
            checkpoints.set_rules(keep, reread)
            checkpoints.save(
                self.steps, state, data_state=position, meta=meta, metric=metric
            )

    def restore(
        self,
        folder: str | os.PathLike[str] | MemoryTier,
        *,
        data: Any = None,
        step: int | None = None,
        only: Sequence[str] | None = None,
        reset: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
    ) -> int:
        """Restore a saved state, onto this engine's mesh, ZeRO stage and precision.

        What each process reads is compared in memory with what the devices held.

        Args:
          folder: where it was saved; the memory of hosts gives its newest step, whole.
          data: an iterator with ``set_state(state)``, to continue at the saved
            position.
          step: the step to restore; None for the newest intact one.
          only: patterns of the leaves to restore, such as ``["params/*"]`` to evaluate
            or fine-tune; None for all. The others are unchanged (8-bit moments are
            quantized again).
          reset: patterns of leaves not to restore, such as ``["opt_state/*"]`` for
            another optimizer.
          rename: leaf of this state -> its name in the checkpoint; both may end in
            ``/*``.

        Returns:
          The step restored.

        Raises:
          FileNotFoundError: if the folder has no checkpoint, or memory none that is
            newer than the run's checkpoints.
          DamagedError: if the step, or every step, is damaged; it names the files.
          ValueError: if the checkpoint is another model's.

        Warns:
          UserWarning: if newer steps are damaged, or a part per data shard starts anew.
        """
        self.placement.require_devices("restore")
        with self._alone("restore"):
            self._ahead.drop()
            structs = self.placement.structs()
            if isinstance(folder, MemoryTier):
                require_whole(step=step, only=only, reset=reset, rename=rename)
                restored, where = folder.restore(structs), folder.memory
                self._opened(folder.checkpoints).run = restored.meta.pop(_RUN)
            else:
                where = folder
                restored = self._opened(folder).restore(
                    structs, step=step, only=only, reset=reset, rename=rename
                )
            if data is not None:
                data.set_state(restored.position(where))
            read = state = restored.tree
            if only is not None or reset:
                state = filled_in(read, self.placement.unpack(self._packed))
            begun = self.placement.begin_parts(state, read, restored.anew)
            self._continue_from(begun)
            return restored.step

    def resume(self, *, data: Any = None) -> int:
        """Go on from the last whole step that ``Offload(optimizer="disk")`` has.

        It is the last step that ended before the process did, however it ended. The
        position in the data is found by drawing the batches of the steps taken. Where
        the newest checkpoint would do, and on another mesh, call `restore`.

        Args:
          data: an iterator at its beginning, or at the position of a step of this
            engine, such as after `restore`.

        Returns:
          The step; where there is none that is newer than the engine's, the engine's,
          whose state is unchanged then.

        Raises:
          ValueError: if the state is not on disk, or what is there is of another run.
        """
        self.placement.require_devices("resume")
        update = self.placement.update
        if not isinstance(update, StoresApart):
            raise ValueError(
                "resume: this engine's state is not on disk, so that it ends with the "
                "process: pass offload=jaxpar.Offload(optimizer='disk', path=...), or "
                "save checkpoints and call restore."
            )
        with self._alone("resume"):
            self._ahead.drop()
            before, last = self.steps, update.whole_step()
            if last is None or last <= before:
                return before
            self._continue_from(update.recovered(self.placement.structs()))
            if data is not None:
                for _ in range(before, self._number):
                    next(data)
            return self._number

    def wait(self) -> None:
        """Return when every step is done and every save is on disk."""
        self._ahead.finish()
        jax.block_until_ready(self._leaves)
        for checkpoints in self._checkpoints.values():
            checkpoints.wait()

    def has_failed_save(self, step: int) -> bool:
        """Whether a save in progress has failed, so that `wait` would raise.

        Args:
          step: the last one taken. A loop that asks after each step learns of it
            seconds after the failure, in all processes at the same step.
        """
        found = [each.has_failed(step) for each in self._checkpoints.values()]
        return any(found)

    @property
    def _packed(self) -> TrainState:
        return jax.tree.unflatten(self._structure, self._leaves)

    def _opened(self, folder: str | os.PathLike[str]) -> Checkpoints:
        path = os.fspath(folder) if is_url(folder) else os.path.abspath(folder)
        if path not in self._checkpoints:
            own = {"former": self.placement.former, "parts": self.placement.parts}
            self._checkpoints[path] = Checkpoints(path, **own)
        return self._checkpoints[path]

    def _placed(self, params: Params) -> Params:
        return placed_params(params, self.placement.on_devices().params)

    def _take(self, state: TrainState) -> None:
        """Continue from another logical state."""
        for own in self._losses.values():
            own.program.step.forget()
        # Free the old state first, or buckets would make it three states in memory.
        self._leaves, self._view = [], None
        self._leaves = jax.tree.leaves(self.placement.pack(state))

    def _settle(self) -> None:
        """Apply what steps have computed and not applied."""
        for own in self._losses.values():
            leaves = own.program.step.settled(self._leaves)
            if leaves is not self._leaves:
                self._leaves, self._view = leaves, None

    def _continue_from(self, state: TrainState) -> None:
        """Continue from a logical state that was saved."""
        self._take(state)
        self._ahead = RunAhead(skipped=skipped_steps(self._losses, state))
        self._number = int(state.step)

    @contextlib.contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        """Exclude other threads, and check that no leaf of `state` was set."""
        with self._thread.calling(method):
            view, self._view = self._view, None
            if view is not None:
                view.require_unchanged()
                self._view = view
            yield
