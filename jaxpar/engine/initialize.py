"""How is an engine made from its arguments: checked, traced, sharded, compiled.

It checks everything that can be checked before compiling.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.compiled.xla_flags import Value
from jaxpar.engine.engine import Engine
from jaxpar.engine.make_run import make_losses, make_run
from jaxpar.mesh import MeshShape, as_mesh
from jaxpar.model.trainable import Trainable
from jaxpar.offload import Offload
from jaxpar.optim.make_update import Optimizer
from jaxpar.pipeline.schedules.asynchronous import Asynchronous
from jaxpar.pipeline.schedules.table import Schedule
from jaxpar.progress import waiting
from jaxpar.sharding.rules import Rules
from jaxpar.sharding.zero_plus_plus import ZeroPlusPlus
from jaxpar.step.carried import Carried
from jaxpar.step.precision import Precision
from jaxpar.types import Batch, LossFn


def initialize(  # noqa: PLR0913 - the one call that users make, all by keyword
    *,
    model: Any,
    loss_fn: LossFn | Mapping[str, LossFn],
    optimizer: Optimizer | Mapping[str, Optimizer],
    sample_batch: Batch | Mapping[str, Batch],
    other_shapes: Sequence[Batch] = (),
    mesh: MeshShape | Mesh | None = None,
    devices: Sequence[Any] | None = None,
    zero: int | ZeroPlusPlus = 1,
    precision: str | Precision = "fp32",
    accumulate: int | Mapping[str, int] = 1,
    schedule: str | Schedule | Asynchronous = "1f1b",
    clip_norm: float | Mapping[str, float | None] | None = None,
    carried: Sequence[Carried] | Mapping[str, Sequence[Carried]] = (),
    trainable: Trainable | None = None,
    trains: Mapping[str, Trainable] | None = None,
    init_from: Mapping[str, str] | None = None,
    seed: int = 0,
    rules: Rules | None = None,
    eval_fn: LossFn | Mapping[str, LossFn] | None = None,
    coupled_batch: bool = False,
    check_loss: bool = True,
    allow_whole: Sequence[str] = (),
    prefetch: bool | None = None,
    two_batch_overlap: bool | None = None,
    xla_options: Mapping[str, Value | None] | None = None,
    offload: Offload | None = None,
) -> Engine:
    """Make an engine that trains a Flax model on a mesh.

    Args:
      model: an NNX factory ``lambda rngs: MyModel(rngs=rngs)``, a Linen module, or a
        `jaxpar.PipelineModel`. Or a dict of several by name; then every loss function
        gets a dict of them, ``loss_fn`` may be a dict of several, and so may eval_fn,
        optimizer, sample_batch, accumulate, clip_norm and carried, by the losses'
        names (docs/several_losses.md).
      loss_fn: ``(model, batch) -> loss`` or ``(loss, metrics)``: a mean over the
        examples it is given, or a `jaxpar.Weighted`. It may also take by name: key (a
        PRNG key of the micro-batch), step (an int32 scalar), training (a bool).
        Metrics are means too, or `jaxpar.Weighted`, `jaxpar.Sum`, `jaxpar.Max`.
      optimizer: any optax transformation, whose update gets ``value=`` (the loss) and
        ``grad=`` if it takes them, and nothing else; or one of `jaxpar.optim`, or any
        object that makes its own update (`jaxpar.optim.MakesUpdate`).
      sample_batch: arrays or `jax.ShapeDtypeStruct`s of a global batch, rows first,
        except values wrapped in `jaxpar.Replicated`; or a `jaxpar.Packed` of them.
      other_shapes: further sample batches, of other lengths or numbers of rows, that
        `Engine.step` takes as well. A program is compiled for each when it first comes,
        and checks the loss by itself. A micro-batch keeps the rows that it has of
        `sample_batch` where that is a whole number of micro-batches.
      mesh: devices by axis (all of them on data by default), or a mesh made by
        `jaxpar.make_mesh`.
      devices: the devices for a mesh shape, such as ``jax.devices()[:4]``; None for as
        many as the shape needs, the same number from each process.
      zero: ZeRO stage: 0 replicates, 1 shards the state, 2 gradients too, 3 gathers
        parameters at use; or a `jaxpar.optim.ZeroPlusPlus`, which communicates less.
      precision: "fp32", "bf16" or "fp16" compute, or a `jaxpar.Precision`. Masters are
        fp32. Parameters are cast, batches are not: with fp32 inputs a model computes in
        fp32, so cast them in loss_fn.
      accumulate: micro-batches a step.
      schedule: the pipeline schedule, if pipe > 1: "1f1b", "gpipe", "zero_bubble",
        "interleaved" (":4" for four chunks a stage), or a `jaxpar.Schedule`; or
        asynchronous, with gradients of older parameters: "pipedream_2bw", "pipemare"
        (":200" for as many steps without delay), or a `jaxpar.pipeline.PipeMare`.
      clip_norm: the largest global norm of the gradients; None for no clipping.
      carried: what else the state keeps and a step updates, as ``[jaxpar.Ema(0.999)]``.
      trainable: path patterns of the parameters to train (``["*/lora_a"]``), or types
        of NNX Variables (``nnx.LoRAParam``); None for all. The others are stored
        sharded in their own dtypes, without gradients and moments.
      trains: with several losses: loss -> what it trains, as `trainable`, of paths that
        begin with the model's name; the model of its own name by default.
      init_from: with several models: model -> the one whose initial parameters and
        mutable state it copies, such as a frozen reference of a policy.
      seed: of parameters, dropout and all other random numbers.
      rules: logical name -> mesh axis, path pattern -> PartitionSpec; they override
        Flax's ``logical_axis_rules`` in context.
      eval_fn: like loss_fn, for `Engine.evaluate`; None for loss_fn.
      coupled_batch: the loss couples examples (in-batch negatives): it sees full
        micro-batches. Implied by a model whose state depends on examples (batch
        statistics), and by a loss that averages over an unbound axis name.
      check_loss: whether to compare, before steps 1, 2, 4, 8 and so on, the loss of
        some rows with that of their halves (`jaxpar.step.loss_check`).
      allow_whole: path patterns of large parameters that may be replicated over data.
      prefetch: whether a loop over layers gathers the next layer while one computes;
        None for GPUs alone. It changes time and memory (two layers more), no numbers.
      two_batch_overlap: whether a device computes two halves of its rows side by side,
        so that one half's sums over the tensor axis run while the other computes; None
        for GPUs that a tensor axis joins. Numbers change by rounding alone.
      xla_options: XLA option -> value, overriding those of `jaxpar.compiled.xla_flags`;
        None for XLA's default. `Engine.explain` prints the options that are set.
      offload: what is stored in the host's memory or on its disk, such as
        ``jaxpar.Offload(optimizer="host")``; None for nothing.

    Returns:
      An engine whose state is initialised, sharded, on the mesh. On compile-only
      devices the engine can only explain and lower its step.

    Raises:
      ValueError: if arguments are inconsistent; the message says which and why.
      TypeError: if `model` is not a Flax model, or `optimizer` neither an optax
        transformation nor one that makes its own update.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
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
    arguments = {**locals(), "mesh": None, "devices": None}
    shown = jax.process_index() == 0
    with waiting("tracing the model", shown=shown):
        made = make_run(arguments, as_mesh(mesh, devices))
    arguments = {**arguments, **made.arguments}
    losses = make_losses(made, arguments)
    with waiting("initialising the state", shown=shown):
        state = made.placement.initial_state(made.init, seed)
    return Engine(made.network, made.placement, losses, state, arguments)
