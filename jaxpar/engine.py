"""How do the parts become a run: `initialize` binds them, `Engine` holds them.

Everything that can be checked is checked here, before anything compiles. The engine
keeps the state as flat leaves, for dispatch costs by the nested node.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.batches import BatchSpec, make_batch_spec
from jaxpar.checkpoint import Checkpoints, Restored
from jaxpar.checks import check_arguments, check_trainable, trace_loss
from jaxpar.gradients import Partition
from jaxpar.layout import Layout, lower_for
from jaxpar.loss_scale import require_scale
from jaxpar.mesh import DATA, MeshShape, make_mesh
from jaxpar.module import Network, make_network
from jaxpar.pipeline.execution import make_execution
from jaxpar.pipeline.schedule import Schedule
from jaxpar.plan.explain import Explanation
from jaxpar.plan.plan import Plan
from jaxpar.plan.target import parse_target
from jaxpar.precision import Precision, make_precision
from jaxpar.sharding.rules import Rules, compute_specs
from jaxpar.sharding.zero import zero_stage
from jaxpar.state import TrainState, make_init, state_shardings
from jaxpar.step import make_train_step
from jaxpar.types import Batch, LossFn, Metrics
from jaxpar.xla_settings import Value, choose_settings, compiler_options

_LAG = 2
"""Steps dispatched before a step's exhausted loss scale must have been noticed."""


def initialize(  # noqa: PLR0913 - the one call that users make, all by keyword
    *,
    model: Any,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    sample_batch: Batch,
    mesh: MeshShape | Mesh | None = None,
    zero: int = 1,
    precision: str | Precision = "fp32",
    accumulate: int = 1,
    schedule: str | Schedule = "1f1b",
    clip_norm: float | None = None,
    seed: int = 0,
    rules: Rules | None = None,
    eval_fn: LossFn | None = None,
    coupled_batch: bool = False,
    allow_whole: Sequence[str] = (),
    xla_options: Mapping[str, Value | None] | None = None,
) -> "Engine":
    """Make an engine that trains a Flax model on a mesh.

    Args:
      model: an NNX factory ``lambda rngs: MyModel(rngs=rngs)``, a Linen module, or a
        `jaxpar.PipelineModel`.
      loss_fn: ``(model, batch) -> loss`` or ``(loss, metrics)``: a mean over the
        examples it is given, or a `jaxpar.Weighted`.
      optimizer: any optax transformation.
      sample_batch: arrays or `jax.ShapeDtypeStruct`s of a global batch, rows first.
      mesh: devices by axis (all of them on data by default), or a mesh made by
        `jaxpar.make_mesh` of some devices.
      zero: ZeRO stage: 0 replicates, 1 shards the state, 2 gradients too, 3 gathers
        parameters at use.
      precision: "fp32", "bf16" or "fp16" compute, or a `jaxpar.Precision`. Masters are
        fp32. Parameters are cast, batches are not: a model given fp32 inputs computes
        in fp32, so cast them in loss_fn.
      accumulate: micro-batches a step.
      schedule: of the pipeline, where the mesh has one: "1f1b", "gpipe", "zero_bubble",
        "interleaved" (":4" for four chunks a stage), or a `jaxpar.Schedule`.
      clip_norm: the largest global norm of the gradients; None for no clipping.
      seed: of parameters, dropout and whatever else is random.
      rules: logical name -> mesh axis, path pattern -> PartitionSpec.
      eval_fn: like loss_fn, for `Engine.evaluate`; None for loss_fn.
      coupled_batch: the loss couples examples (in-batch negatives): it is given whole
        micro-batches. Implied by a model that changes its state (batch statistics).
      allow_whole: path patterns of large parameters that may stay whole over data.
      xla_options: XLA's option -> value, over those of `jaxpar.xla_settings`; None for
        XLA's default. `Engine.explain` prints what is set.

    Returns:
      An engine whose state is initialised, sharded, on the mesh. Where the mesh's
      devices are only to compile for, the engine can explain and lower its step.

    Raises:
      ValueError: if arguments do not fit each other; the message says which and why.
      TypeError: if `model` is not a Flax model, or `optimizer` not an optax
        transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> engine = initialize(
      ...     model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
      ...     loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2),
      ...     optimizer=optax.sgd(0.1),
      ...     sample_batch={"x": jnp.ones((8, 4))},
      ...     zero=3,
      ... )
      >>> first = engine.step({"x": jnp.ones((8, 4))})
      >>> bool(engine.step({"x": jnp.ones((8, 4))})["loss"] < first["loss"])
      True
    """
    mesh = mesh if isinstance(mesh, Mesh) else make_mesh(mesh or MeshShape())
    check_arguments(mesh, optimizer, clip_norm, seed)
    stage, precision = zero_stage(zero), make_precision(precision)
    batch_spec = make_batch_spec(sample_batch, mesh, accumulate)
    rows = batch_spec.rows(batch_spec.num_rows // (accumulate * mesh.shape[DATA]))
    network = make_network(model, loss_fn, rows)
    execution = make_execution(network, mesh, schedule, accumulate, loss_fn, rows)
    check_trainable(jax.eval_shape(network.init, jax.random.key(seed))[0])
    init = make_init(network, optimizer)
    abstract = jax.eval_shape(init, jax.random.key(seed))
    leaves, names = tree.named_leaves(abstract.params), network.dim_names()
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    compute = compute_specs(shapes, names, rules or {}, mesh.shape)
    plans = execution.plan_leaves(leaves, compute, stage, mesh.shape, allow_whole)
    cast = tree.with_dtype(abstract.params, precision.compute_dtype)
    traced = trace_loss(network, loss_fn, cast, abstract.model_state, rows)
    coupled, like = coupled_batch or traced.changes_state, abstract.params
    # XLA rejects reductions over a manual axis of one device (jax 0.11.2).
    automatic, owned = coupled or mesh.shape[DATA] == 1, tuple(plans.values())
    partition = Partition(network, owned, stage, precision, mesh, automatic)
    step = make_train_step(
        execution.make_gradients(partition, loss_fn, like, accumulate),
        optimizer,
        clip_norm=clip_norm,
        scales_loss=precision.scales_loss,
    )
    evaluation = execution.make_evaluation(partition, eval_fn or loss_fn, like)
    layout = Layout(
        mesh,
        abstract,
        state_shardings(abstract, plans, stage, mesh),
        plans,
        stage,
        coupled,
        choose_settings(mesh, xla_options),
        execution,
        precision,
        traced.flops * accumulate * mesh.shape[DATA],
    )
    state = layout.initial_state(init, seed)
    return Engine(network, layout, batch_spec, step, evaluation, state)


class Engine:
    """A model, its optimizer and their state on a mesh; made by `initialize`.

    Args:
      network: the model.
      layout: where every leaf of the state rests.
      batch_spec: the shapes of a global batch.
      step: the pure training step.
      evaluation: the pure evaluation.
      state: the state to start from.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        batch_spec: BatchSpec,
        step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
        evaluation: Callable[..., Metrics],
        state: TrainState,
    ):
        self.mesh = batch_spec.mesh
        self._network, self._layout, self._batch_spec = network, layout, batch_spec
        self._leaves, self._structure = jax.tree.flatten(state)
        self._checkpoints: dict[str, Checkpoints] = {}
        self._exhausted: list[jax.Array] = []
        rest = jax.tree.leaves(layout.shardings)
        replicated = NamedSharding(self.mesh, P())

        def flat_step(state: list, batch: Batch) -> tuple[list, Metrics, list]:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                new, metrics = step(jax.tree.unflatten(self._structure, state), batch)
            watched = [new.loss_scale.exhausted] if layout.precision.scales_loss else []
            return jax.tree.leaves(new), metrics, watched

        def evaluate(params: Any, model_state: Any, batch: Batch, key: Any) -> Metrics:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return evaluation(params, model_state, batch, key)

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
        """A view of the sharded state; the next step donates its arrays."""
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

        Args:
          state: a train state of this engine's shapes and shardings.
          batch: as for `step`.

        Returns:
          The new state and the metrics.
        """
        leaves = jax.tree.leaves(state)
        new, metrics, _ = self._step(leaves, self._put(batch))
        return jax.tree.unflatten(self._structure, new), metrics

    def evaluate(self, batch: Batch) -> Metrics:
        """Evaluate on a batch of any size that the data axis divides.

        Args:
          batch: as for `step`, with any number of rows.

        Returns:
          loss, weight (what the loss's total was divided by) and the user's metrics,
          by eval_fn with the model in evaluation mode.
        """
        placed = self._put(batch, any_size=True)
        state = self.state
        return self._evaluate(state.params, state.model_state, placed, state.key)

    def model(self) -> Any:
        """The trained model itself, in evaluation mode: to sample from, to export.

        Returns:
          The nnx.Module (or a `jaxpar.module.LinenModel`) around views of the fp32
          masters, sharded as they rest; the next step donates them.
        """
        self._layout.require_devices("model")
        state = self.state
        variables = (state.params, state.model_state)
        return self._network.run(
            lambda model, _: model, variables, state.key, None, training=False
        )[0]

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
        return self._layout.explain(self.lower().compile())

    def plan(self, target: str, *, tokens_per_step: int | None = None) -> Plan:
        """Compile the step, and say what it costs on the mesh's devices.

        Args:
          target: what the devices are, such as "h200:1x8": the mesh is made of
            `jaxpar.plan.target.parse_target(target).devices()`.
          tokens_per_step: what a step trains on, to tell tokens per second.

        Returns:
          The plan.

        Raises:
          ValueError: if the mesh has another number of devices.
        """
        return self._layout.plan(self._traced(), parse_target(target), tokens_per_step)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        data: Any = None,
        keep: int | None = 3,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Save the state; returns when it is copied to the host.

        Args:
          folder: the run's checkpoints, one sub-folder per step.
          data: an iterator with ``get_state()`` (Grain's, or `jaxpar.data.Loader`),
            whose position is saved too.
          keep: how many steps stay on disk; None for all.
          meta: JSON values to keep beside the state.

        Raises:
          ValueError: if the folder holds another model's checkpoints.
        """
        self._layout.require_devices("save")
        self._check_loss_scale(lag=0)
        checkpoints = self._opened(folder)
        checkpoints.set_keep(keep)
        checkpoints.save(
            int(self.state.step),
            self.state,
            data_state=None if data is None else data.get_state(),
            meta={"mesh": dict(self.mesh.shape), **(meta or {})},
        )

    def restore(
        self,
        folder: str | os.PathLike[str],
        *,
        data: Any = None,
        step: int | None = None,
    ) -> int:
        """Take up a saved state, onto this engine's mesh, stage and precision.

        Args:
          folder: where it was saved.
          data: an iterator with ``set_state(state)``, to go on where the saved one
            stood.
          step: the step to restore; None for the newest complete one.

        Returns:
          The step restored.

        Raises:
          FileNotFoundError: if there is no checkpoint.
          ValueError: if it is another model's.
        """
        self._layout.require_devices("restore")
        restored = self._opened(folder).restore(self._layout.structs(), step=step)
        if data is not None:
            data.set_state(_position_of(restored, folder))
        self._leaves = jax.tree.leaves(restored.tree)
        self._exhausted.clear()
        return restored.step

    def wait(self) -> None:
        """Return when every step is done and every save is on disk."""
        jax.block_until_ready(self._leaves)
        self._check_loss_scale(lag=0)
        for checkpoints in self._checkpoints.values():
            checkpoints.wait()

    def _traced(self) -> jax.stages.Traced:
        return self._step.trace(self._leaves, self._batch_spec.structs())

    def _put(self, batch: Batch, *, any_size: bool = False) -> Batch:
        self._layout.require_devices("batch")
        return self._batch_spec.put(batch, any_size=any_size)

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
