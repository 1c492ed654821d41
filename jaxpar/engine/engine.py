"""What is a run: `Engine` binds a model, its optimizer and their state on a mesh.

It holds the state as flat leaves, because dispatch costs grow with nested nodes.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxpar.checkpoint import Checkpoints
from jaxpar.engine.description import describe
from jaxpar.engine.loss_step import LossStep, unknown_loss
from jaxpar.engine.one_thread import OneThread
from jaxpar.engine.placement import Placement
from jaxpar.engine.replay import Replays
from jaxpar.engine.replicas import Probe, make_probe
from jaxpar.engine.run_ahead import Dispatched, RunAhead
from jaxpar.engine.saved_state import SavedState
from jaxpar.engine.state_view import (
    StateView,
    discard,
    make_view,
)
from jaxpar.model.bridge import Network
from jaxpar.pipeline.execution import Execution
from jaxpar.sharding.memory_kinds import moved_to_device
from jaxpar.step.state import TrainState
from jaxpar.step.update import HostUpdate, StoresApart, Update
from jaxpar.tree import merged, named_leaves
from jaxpar.types import Batch, Metrics, Params


class Engine(SavedState):
    """A model, its optimizer and their state on a mesh; made by `initialize`.

    Its methods are called by one thread at a time.

    Args:
      network: the model.
      placement: where every leaf of the state is stored.
      losses: name -> a loss and its compiled functions; the name of a single one is
        None.
      state: the initial state, packed.
      arguments: the arguments of `initialize`, to rebuild the engine on another mesh.

    Attributes:
      mesh: the mesh.
      placement: as given.
      spec, batch_spec: those of the (first) loss.
    """

    def __init__(
        self,
        network: Network,
        placement: Placement,
        losses: Mapping[str | None, LossStep],
        state: TrainState,
        arguments: Mapping[str, Any],
    ):
        first = next(iter(losses.values()))
        super().__init__(placement, first.spec, arguments)
        self.mesh, self.batch_spec = placement.mesh, first.batch_spec
        self._network, self._losses = network, losses
        self._leaves, self._structure = jax.tree.flatten(state)
        self._checkpoints: dict[str, Checkpoints] = {}
        self._probe: Probe | None = None
        self._replays: Replays | None = None
        self._view: StateView | None = None
        self._thread = OneThread("engine")
        self._ahead, self._number = RunAhead(), 0

    def __repr__(self) -> str:
        # Without waiting for the steps that are in flight, as `steps` does.
        given = self._network, self.placement, self.spec
        rows = self.batch_spec.num_rows
        return f"<jaxpar.Engine: {describe(*given, rows)}, at step {self._number}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "An Engine can't be pickled or copied: it holds arrays on devices and "
            "compiled programs. Write its state with engine.save(folder), and restore "
            "it into an engine made by jaxpar.initialize in the other process."
        )

    @property
    def state(self) -> TrainState:
        """The sharded state, leaf by leaf.

        A view, whose arrays the next step donates; with a fused optimizer a copy.
        Setting a leaf of it has no effect, and the next call raises; use `load_params`
        to set parameters.
        """
        if self._view is None:
            self._view = make_view(self.placement.unpack(self._packed))
        return self._view.state

    def loss(self, name: str | None = None) -> LossStep:
        """One of several losses, whose step can be explained, verified and lowered.

        Args:
          name: its name; None if there is only one.
        """
        if name not in self._losses:
            raise ValueError(unknown_loss(name, self._losses))
        return self._losses[name]

    def step(self, batch: Batch, *, loss: str | None = None) -> Metrics:
        """Take one training step; returns when it is dispatched.

        Waits for the step before the last, so at most two steps are in flight.

        Args:
          batch: this process's rows of a global batch, or global `jax.Array`s; of the
            shapes of `sample_batch` or `other_shapes`, alike on all processes.
          loss: which of several losses.

        Returns:
          Scalars on the device: loss, grad_norm (before clipping), skipped (steps
          skipped so far), loss_scale, learning_rate where the optimizer's state has it,
          and the user's metrics.

        Raises:
          ValueError: if the batch has other shapes than these, a leaf of `state` was
            set, or the loss is not a mean over rows (see `jaxpar.step.loss_check`).
          FloatingPointError: if a recent step overflowed at the least loss scale.
          RuntimeError: if another thread is in a method of this engine.

        Warns:
          SkippedStepWarning: at the first skipped step, the second, the fourth and so
            on; not if the loss is scaled, where overflows are normal.
        """
        with self._alone("step"):
            own, placed = self._put(batch, loss)
            own.program.loss_check.before_call(
                lambda: own.focus.get(self._packed), placed, self._ahead
            )
            # First drop the view: with a fused optimizer it holds arrays of its own.
            self._view, self._number, before = None, self._number + 1, self._leaves
            self._leaves, metrics, exhausted = own.stepped(before, placed)
            discard(before)
            watched = (metrics["loss"], metrics["skipped"], *exhausted)
            self._ahead.add(Dispatched(f"step {self._number}", *watched, loss=loss))
            return metrics

    def train_step(
        self, state: TrainState, batch: Batch, *, loss: str | None = None
    ) -> tuple[TrainState, Metrics]:
        """The compiled pure step; donates `state`, or a copy where it is the engine's.

        With a fused optimizer the state is copied into buckets and out of them.

        Args:
          state: a train state of this engine's shapes and shardings.
          batch: as for `step`.
          loss: as for `step`.

        Raises:
          ValueError: as `step`, or if a part of the state is on disk, or updates are
            late.
        """
        _require_pure(self.placement.update, self.loss(loss).spec.execution)
        with self._alone("train_step"):
            own, placed = self._put(batch, loss)
            ours = set(map(id, self._leaves))
            leaves = [
                jnp.copy(leaf) if id(leaf) in ours else leaf
                for leaf in jax.tree.leaves(self.placement.pack(state))
            ]
            given = own.focus.get(jax.tree.unflatten(self._structure, leaves))
            own.program.loss_check.before_call(lambda: given, placed, self._ahead)
            new, metrics, _ = own.stepped(leaves, placed)
            self._ahead.add(Dispatched("a train_step", metrics["loss"]))
            packed = jax.tree.unflatten(self._structure, new)
            return self.placement.unpack(packed), metrics

    def evaluate(
        self, batch: Batch, *, params: Params | None = None, loss: str | None = None
    ) -> Metrics:
        """Evaluate on a batch of any number of rows.

        Rows left over by data (all rows, if the loss couples or averages them) are
        computed on every shard, by a separate program. With several processes, waits
        for earlier programs.

        Args:
          batch: as for `step`; processes may have different numbers of rows, or none.
          params: other parameters that the loss trains, such as an average.
          loss: which of several losses.

        Returns:
          "loss", "weight" (the rows, or the sum of a `jaxpar.Weighted` loss's weights)
          and the user's metrics by their names, from eval_fn in evaluation mode.
        """
        with self._alone("evaluate"):
            self.placement.require_devices("batch")
            self._ahead.finish_before_others()
            own, parts = self.loss(loss).put_any(batch)
            seen = own.focus.get(self._packed)
            if parts[0] is not None:
                own.program.eval_check.before_call(lambda: seen, parts[0], self._ahead)
            metrics = own.evaluated(parts, params, seen)
            self._ahead.add(Dispatched("an evaluation", metrics["loss"]))
            return metrics

    def model(self, *, params: Params | None = None) -> Any:
        """The trained model in evaluation mode, to sample from or to export.

        Args:
          params: other parameters, as for `evaluate`; None for the engine's.

        Returns:
          The nnx.Module (or a `jaxpar.model.linen.LinenModel`; a dict of several) with
          the fp32 masters, in the devices' memory; the next step donates those there.
        """
        self.placement.require_devices("model")
        with self._alone("model"):
            packed, how = self._packed, {"training": False, "step": self._packed.step}
            own = params is None and self.placement.update.unpack(packed.params, ())[0]
            own = own or self._placed(params)
            whole = moved_to_device(merged(own, packed.frozen))
            given = (whole, packed.model_state), packed.key, None
            return self._network.run(lambda model, _: model, *given, **how)[0]

    def probe(self) -> None:
        """Compare replicas on all devices bit by bit; waits for the devices.

        Raises:
          CorruptionError: if replicas differ; it names leaves and devices.
        """
        self.placement.require_devices("probe")
        with self._alone("probe"):
            if self._probe is None:
                shardings = named_leaves(self.placement.packed_shardings)
                self._probe = make_probe(self.mesh, shardings)
            self._probe.check(self._leaves)

    def replays(self) -> Replays:
        """What compares steps with replays of them on shifted devices; see `Replays`.

        Raises:
          ValueError: if steps can't be replayed: the mesh has one device, or the host
            computes the update.
        """
        if self._replays is None:
            given = self.placement, self._losses, self.arguments
            self._replays = Replays(*given, self._finished_leaves)
        return self._replays

    def traces(self) -> Mapping[str, jax.stages.Traced]:
        """See `CompiledStep`."""
        return self.loss().traces()

    def _finished_leaves(self) -> list[jax.Array]:
        self._ahead.finish()
        return jax.block_until_ready(self._leaves)

    def _put(self, batch: Batch, loss: str | None) -> tuple[LossStep, Batch]:
        self.placement.require_devices("batch")
        return self.loss(loss).put(batch)


def _require_pure(update: Update, execution: Execution) -> None:
    """Raise for an update whose steps are no function of the state alone.

    Raises:
      ValueError: for such a one.
    """
    if isinstance(update, StoresApart):
        raise ValueError(
            "train_step: the state of Offload(optimizer='disk') is the engine's own, "
            "in its files; call engine.step(batch)."
        )
    if isinstance(update, HostUpdate) and update.delay_after is not None:
        raise ValueError(
            "train_step: with Offload(delayed=True) a step applies the gradients of "
            "the engine's last one; call engine.step(batch)."
        )
    if execution.delay:
        raise ValueError(
            "train_step: with an asynchronous schedule a step ends a batch that the "
            "engine was given before; call engine.step(batch)."
        )
