"""What is read from the arguments of `jaxpar.initialize`: of the run, and of a loss."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxpar.compiled.xla_flags import Value
from jaxpar.engine.batches import BatchSpec, make_batch_spec
from jaxpar.engine.checks import check_arguments
from jaxpar.engine.two_batches import NOT_HALVED, Halves, halves_of
from jaxpar.mesh import PIPE
from jaxpar.model.trainable import Trainable
from jaxpar.offload.streamed_optimizer import offloaded
from jaxpar.optim.make_update import Optimizer, make_update
from jaxpar.pipeline.schedules.asynchronous import Asynchronous
from jaxpar.pipeline.schedules.table import Schedule
from jaxpar.sharding.rules import Rules
from jaxpar.sharding.zero import ZeroStage
from jaxpar.step.carried import Carried
from jaxpar.step.inputs import Inputs, abstract_inputs, check_packed
from jaxpar.step.loss import Loss, as_losses
from jaxpar.step.precision import Precision


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What all losses of an engine share; see `jaxpar.initialize`."""

    mesh: Mesh
    zero: ZeroStage
    precision: Precision
    schedule: str | Schedule | Asynchronous
    rules: Rules
    coupled_batch: bool
    check_loss: bool
    allow_whole: Sequence[str]
    prefetch: bool | None
    two_batch_overlap: bool | None
    xla_options: Mapping[str, Value | None] | None


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """A loss, and what it is trained with.

    Attributes:
      loss: for training.
      evaluation: for evaluation; may be the same.
      optimizer: of what it trains.
      batch_spec: the shapes of a global batch.
      accumulate: micro-batches a step.
      clip_norm: the largest global norm of the gradients, or None.
      carried: the parts of the state that a step updates.
      trainable: the parameters that it trains; None for all.
      averages: name of a moving average that it calls -> the model that it averages,
        as which it is stored.
      halves: whether it is called for halves of a device's rows.
    """

    loss: Loss
    evaluation: Loss
    optimizer: Optimizer
    batch_spec: BatchSpec
    accumulate: int
    clip_norm: float | None
    carried: Sequence[Carried]
    trainable: Trainable | None
    averages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    halves: Halves = NOT_HALVED

    @property
    def num_calls(self) -> int:
        """Calls of the loss function in a step."""
        return self.batch_spec.num_calls(self.accumulate) * self.halves.times

    @property
    def rows(self) -> Inputs:
        """Shapes of what the loss function is given: one shard of a micro-batch."""
        spec = self.batch_spec
        return abstract_inputs(spec.rows(spec.num_rows // self.num_calls))


def read_loss(
    run: RunSpec, given: Mapping[str, Any], name: str | None = None
) -> LossSpec:
    """Read and check the arguments of `jaxpar.initialize` for one loss.

    Args:
      run: what all losses share.
      given: the arguments.
      name: of the loss among several.
    """
    own = {name: given[name] for name in ("optimizer", "clip_norm", "carried")}
    check_arguments(seed=given["seed"], **own)
    own["optimizer"] = offloaded(own["optimizer"], given.get("offload"), make_update)
    sample_batch, accumulate = given["sample_batch"], given["accumulate"]
    losses = as_losses(given["loss_fn"], given["eval_fn"], name)
    pipe, coupled = run.mesh.shape[PIPE], run.coupled_batch
    check_packed(sample_batch, pipe, coupled_batch=coupled)
    batch = make_batch_spec(sample_batch, run.mesh, accumulate)
    return LossSpec(
        *losses,
        batch_spec=batch,
        accumulate=accumulate,
        halves=halves_of(run.two_batch_overlap, run.mesh, batch, accumulate),
        trainable=given["trainable"],
        **own,
    )
