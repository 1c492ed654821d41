"""What is a run: `Engine` binds a model, its optimizer and their state on a mesh.

It keeps the state as flat leaves, for dispatch costs by the nested node.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.batches import BatchSpec
from jaxpar.checkpoint import Checkpoints, Keep, Restored
from jaxpar.layout import Layout, lower_for
from jaxpar.loss_scale import require_scale
from jaxpar.mesh import PIPE, TENSOR, MeshShape
from jaxpar.module import Network
from jaxpar.plan.apart import call
from jaxpar.plan.budget import Budget, BudgetExceeded, check
from jaxpar.plan.explain import Explanation
from jaxpar.plan.plan import Plan
from jaxpar.plan.target import parse_target
from jaxpar.replicas import Probe, make_probe
from jaxpar.state import TrainState, filled_in, require_sound
from jaxpar.tree import named_leaves
from jaxpar.types import Batch, Metrics
from jaxpar.xla_settings import compiler_options

_LAG = 2
"""Steps dispatched before a step's exhausted loss scale must have been noticed."""


class Engine:
    """A model, its optimizer and their state on a mesh; made by `initialize`.

    Args:
      network: the model.
      layout: where every leaf of the state rests.
      batch_spec: the shapes of a global batch.
      step: the pure training step.
      evaluation: the pure evaluation.
      state: what is kept of the state to start from.
      given: what `initialize` was given, to make the engine again elsewhere.

    Attributes:
      mesh: the mesh.
      layout: as given.
      batch_spec: as given.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        batch_spec: BatchSpec,
        step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
        evaluation: Callable[..., Metrics],
        state: TrainState,
        given: Mapping[str, Any],
    ):
        self.mesh = batch_spec.mesh
        self._given = given
        self._network, self.layout, self.batch_spec = network, layout, batch_spec
        self._leaves, self._structure = jax.tree.flatten(state)
        self._checkpoints: dict[str, Checkpoints] = {}
        self._exhausted: list[jax.Array] = []
        self._probe: Probe | None = None
        rest = jax.tree.leaves(layout.kept_shardings)
        replicated = NamedSharding(self.mesh, P())

        def flat_step(state: list, batch: Batch) -> tuple[list, Metrics, list]:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                new, metrics = step(jax.tree.unflatten(self._structure, state), batch)
            watched = [new.loss_scale.exhausted] if layout.precision.scales_loss else []
            return jax.tree.leaves(new), metrics, watched

        def evaluate(params: Any, model_state: Any, batch: Batch, key: Any) -> Metrics:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                computed = layout.update.computed(params)
                return evaluation(computed, model_state, batch, key)

        self._step = jax.jit(
            flat_step,
            in_shardings=(rest, batch_spec.sharding),
            out_shardings=(rest, replicated, replicated),
            donate_argnums=0,
            compiler_options=compiler_options(layout.settings),
        )
        self._evaluate = jax.jit(evaluate, out_shardings=replicated)

    @property
    def state(self) -> TrainState:
        """The sharded state, leaf by leaf.

        A view, whose arrays the next step donates; a fused optimizer's is a copy.
        """
        return self.layout.logical(self._kept)

    @property
    def steps(self) -> int:
        """Steps taken, skipped ones too; waits for them."""
        return int(self._kept.step)

    @property
    def _kept(self) -> TrainState:
        return jax.tree.unflatten(self._structure, self._leaves)

    def step(self, batch: Batch) -> Metrics:
        """Take one training step; returns when it is dispatched.

        Args:
          batch: this process's rows of a global batch, or global `jax.Array`s.

        Returns:
          Scalars on the device: loss, grad_norm (before clipping), skipped (steps
          skipped so far), loss_scale, learning_rate where the optimizer's state has it,
          and the user's metrics.

        Raises:
          ValueError: if the batch differs from the sample batch.
          FloatingPointError: if a recent step overflowed at the least loss scale.
        """
        placed = self._put(batch)
        self._leaves, metrics, exhausted = self._step(self._leaves, placed)
        self._exhausted.extend(exhausted)
        self._check_loss_scale(lag=_LAG)
        return metrics

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The compiled pure step; donates `state`.

        With a fused optimizer the state is copied into its buckets, and out of them.

        Args:
          state: a train state of this engine's shapes and shardings.
          batch: as for `step`.

        Returns:
          The new state and the metrics.
        """
        leaves = jax.tree.leaves(self.layout.keep(state))
        new, metrics, _ = self._step(leaves, self._put(batch))
        return self.layout.logical(jax.tree.unflatten(self._structure, new)), metrics

    def evaluate(self, batch: Batch) -> Metrics:
        """Evaluate on a batch of any size that the data axis divides.

        Args:
          batch: as for `step`, with any number of rows.

        Returns:
          loss, weight (what the loss's total was divided by) and the user's metrics,
          by eval_fn with the model in evaluation mode.
        """
        placed = self._put(batch, any_size=True)
        kept = self._kept
        return self._evaluate(kept.params, kept.model_state, placed, kept.key)

    def model(self) -> Any:
        """The trained model itself, in evaluation mode: to sample from, to export.

        Returns:
          The nnx.Module (or a `jaxpar.module.LinenModel`) around the fp32 masters,
          sharded as they rest: views that the next step donates, as `state`.
        """
        self.layout.require_devices("model")
        kept = self._kept
        params, _ = self.layout.update.logical(kept.params, ())
        given = (params, kept.model_state), kept.key, None
        return self._network.run(lambda model, _: model, *given, training=False)[0]

    def lower(self) -> jax.stages.Lowered:
        """Lower the step for the mesh's devices, which need not be here.

        Returns:
          What ``.compile()`` makes `step`'s program from. Its arguments are named
          ``state[0]``, ``state[1]`` and so on, and ``batch...``.
        """
        return lower_for(self._traced(), self.mesh)

    def explain(self) -> Explanation:
        """Compile the step, and say what every leaf, axis and the memory cost.

        Returns:
          Text when printed, also in a notebook; `as_json` for programs.
        """
        return self.layout.explain(self.lower().compile())

    def budget(self) -> Budget:
        """Compile the step, and record what it holds and moves now.

        Returns:
          A budget to keep in a file (`Budget.as_json`) and to `verify` against.
        """
        return self.layout.measure(self.lower()).budget()

    def verify(self, budget: Budget | None = None) -> Budget:
        """Compile the step, and hold it to a budget.

        State bytes, bytes that cross each axis by kind of collective, and the peak. A
        loop whose trip count the program does not tell is counted once.

        Args:
          budget: what the step may hold and move, such as `budget` recorded; None for
            what its ZeRO stage, precision and micro-batches mean by design. That
            bounds the state and what crosses data, not tensor and pipe, and not what
            an optimizer moves for itself (Muon).

        Returns:
          What the step holds and moves now, as `budget` does.

        Raises:
          BudgetExceeded: if it is more; the message names the leaves, or the
            operations by their lines in the source.
        """
        measured = self.layout.measure(self.lower())
        allowed = budget or self.layout.budget()
        violations = check(allowed, measured)
        if violations:
            raise BudgetExceeded(violations)
        return measured.budget()

    def plan(
        self,
        target: str,
        *,
        mesh: MeshShape | None = None,
        tokens_per_step: int | None = None,
    ) -> Plan:
        """Compile the step for hardware that need not be here, and say what it costs.

        Compiles in a process of its own, which is sent what `jaxpar.initialize` was
        given, the batch as shapes; nothing is allocated.

        Args:
          target: the devices, such as "h200:8x8", "v5p:4x4x4" or "cpu:8".
          mesh: how they are laid out; None for this mesh, its data axis taking the
            devices left over.
          tokens_per_step: what a step trains on, to tell tokens per second.

        Returns:
          The plan.

        Raises:
          ValueError: if there is no such target, or the mesh or the batch does not fit
            it.
          ApartError: if the compiler fails, crashes, or takes more memory than there
            is.
        """
        found = parse_target(target)
        if not self.layout.can_run and mesh is None:
            return self.layout.plan(self._traced(), found, tokens_per_step)
        sizes = self.mesh.shape
        shape = mesh or MeshShape(pipe=sizes[PIPE], tensor=sizes[TENSOR])
        args = (self._given, target, shape, tokens_per_step)
        return call("jaxpar.planner:plan_call", *args, what=f"plan on {target}")

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        data: Any = None,
        keep: int | Keep | None = 3,
        meta: dict[str, Any] | None = None,
        metric: float | None = None,
    ) -> None:
        """Save the state; returns when it is copied to the host.

        The step counts as saved when `wait`, or the next save, has returned: it is
        written, synced, read back and moved to its name then.

        Args:
          folder: the run's checkpoints, one sub-folder per step.
          data: an iterator with ``get_state()`` (Grain's, or `jaxpar.data.Loader`),
            whose position is saved too.
          keep: how many of the newest steps stay on disk, None for all; a
            `jaxpar.Keep` for every k-th and the best as well.
          meta: JSON values to keep beside the state.
          metric: of this step, the less the better, for `jaxpar.Keep.best`.

        Raises:
          ValueError: if the folder holds another model's checkpoints.
          FloatingPointError: if a parameter is not finite, or anything is NaN.
          OSError: if the disk has no room, or an earlier save failed. Steps saved
            before are whole.
        """
        self.layout.require_devices("save")
        self._check_loss_scale(lag=0)
        require_sound(state := self.state)
        checkpoints = self._opened(folder)
        checkpoints.set_keep(keep)
        checkpoints.save(
            self.steps,
            state,
            data_state=None if data is None else data.get_state(),
            meta={"mesh": dict(self.mesh.shape), **(meta or {})},
            metric=metric,
        )

    def restore(
        self,
        folder: str | os.PathLike[str],
        *,
        data: Any = None,
        step: int | None = None,
        only: Sequence[str] | None = None,
        reset: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
    ) -> int:
        """Take up a saved state, onto this engine's mesh, stage and precision.

        Every file of it is verified first.

        Args:
          folder: where it was saved.
          data: an iterator with ``set_state(state)``, to go on where the saved one
            stood.
          step: the step to restore; None for the newest that is sound.
          only: patterns of the leaves to take, such as ``["params/*"]`` to evaluate or
            fine-tune; None for all. The others stay as they are (moments in 8 bits
            are coded anew).
          reset: patterns of leaves not to take, such as ``["opt_state/*"]`` for another
            optimizer.
          rename: leaf of this state -> its name in the checkpoint; both may end in
            ``/*``.

        Returns:
          The step restored.

        Raises:
          FileNotFoundError: if there is no checkpoint.
          DamagedError: if the step, or every one, is damaged; it names the files.
          ValueError: if it is another model's.

        Warns:
          UserWarning: if newer steps are damaged.
        """
        self.layout.require_devices("restore")
        restored = self._opened(folder).restore(
            self.layout.structs(), step=step, only=only, reset=reset, rename=rename
        )
        if data is not None:
            data.set_state(_position_of(restored, folder))
        state = restored.tree
        if only is not None or reset:
            state = filled_in(state, self.state)
        self._leaves = []  # Else three states are there, where one is kept in buckets.
        self._leaves = jax.tree.leaves(self.layout.keep(state))
        self._exhausted.clear()
        return restored.step

    def probe(self) -> None:
        """Compare what devices hold replicated, to the bit; waits for them.

        Raises:
          CorruptionError: if replicas differ; it names leaves and devices.
        """
        self.layout.require_devices("probe")
        if self._probe is None:
            self._probe = make_probe(
                self.mesh, named_leaves(self.layout.kept_shardings)
            )
        self._probe.check(self._leaves)

    def wait(self) -> None:
        """Return when every step is done and every save is on disk."""
        jax.block_until_ready(self._leaves)
        self._check_loss_scale(lag=0)
        for checkpoints in self._checkpoints.values():
            checkpoints.wait()

    def _traced(self) -> jax.stages.Traced:
        return self._step.trace(self._leaves, self.batch_spec.structs())

    def _put(self, batch: Batch, *, any_size: bool = False) -> Batch:
        self.layout.require_devices("batch")
        return self.batch_spec.put(batch, any_size=any_size)

    def _opened(self, folder: str | os.PathLike[str]) -> Checkpoints:
        path = os.path.abspath(folder)
        if path not in self._checkpoints:
            self._checkpoints[path] = Checkpoints(path)
        return self._checkpoints[path]

    def _check_loss_scale(self, lag: int) -> None:
        """Raise for a step that overflowed at the least scale, `lag` steps ago."""
        while len(self._exhausted) > lag:
            require_scale(self._exhausted.pop(0))


def _position_of(restored: Restored, folder: str | os.PathLike[str]) -> Any:
    if restored.data_state is None:
        raise ValueError(
            f"data: step {restored.step} of {os.fspath(folder)!r} holds no position in "
            "the data, for it was saved without data=. Leave data out to start it anew."
        )
    return restored.data_state
