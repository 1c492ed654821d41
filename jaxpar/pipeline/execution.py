"""How is a loss function run over the pipe axis: on one stage, or by a schedule?

The engine asks an `Execution` for the gradients and the evaluation; which one, the mesh
decides.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from jaxpar.mesh import PIPE
from jaxpar.model.bridge import Network
from jaxpar.model.network import PipelineNetwork
from jaxpar.pipeline.block_cost import BlockWork, check_split
from jaxpar.pipeline.gradients import Pipeline
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import Schedule
from jaxpar.pipeline.stages import Stages
from jaxpar.sharding.rules import Spec
from jaxpar.sharding.zero import LeafSharding, ZeroStage, shard_leaves
from jaxpar.step.gradients import (
    Partition,
    make_evaluation,
    make_forward,
    make_gradients,
)
from jaxpar.step.loss import Loss, Sums
from jaxpar.types import Params, PyTree


@runtime_checkable
class Execution(Protocol):
    """How the parts of a model meet the pipe axis."""

    def shard_leaves(
        self,
        leaves: Mapping[str, jax.ShapeDtypeStruct],
        compute: Mapping[str, Spec],
        zero: ZeroStage,
        sizes: Mapping[str, int],
        allow_whole: Sequence[str],
    ) -> dict[str, LeafSharding]:
        """As `jaxpar.sharding.zero.shard_leaves`."""
        ...

    def make_gradients(
        self,
        partition: Partition,
        loss: Loss,
        params_like: Params,
        accumulate: int,
    ) -> Callable[..., tuple[Params, Sums, PyTree]]:
        """As `jaxpar.step.gradients.make_gradients`."""
        ...

    def make_evaluation(
        self, partition: Partition, loss: Loss, params_like: Params
    ) -> Callable[..., Sums]:
        """As `jaxpar.step.gradients.make_evaluation`."""
        ...

    def make_forward(
        self, partition: Partition, loss: Loss, params_like: Params, *, training: bool
    ) -> Callable[..., Sums]:
        """As `jaxpar.step.gradients.make_forward`."""
        ...

    def crossing(self, leaf_shardings: Sequence[LeafSharding]) -> list[LeafSharding]:
        """The parameters' plans as they cross data."""
        ...

    def notes(
        self, zero: ZeroStage, leaf_shardings: Mapping[str, LeafSharding]
    ) -> tuple[str, ...]:
        """What to say of the pipe axis in an explanation."""
        ...

    @property
    def bubble(self) -> float:
        """Fraction of a step that a device is idle, by the schedule."""
        ...

    @property
    def schedule(self) -> Schedule | None:
        """The order of a pipeline's work; None without one."""
        ...

    @property
    def times(self) -> Mapping[str, float]:
        """What each kind of its work takes, in forwards of a stage."""
        ...

    @property
    def active_fraction(self) -> float:
        """Fraction of the ticks in which a stage does what it may do in a tick."""
        ...

    def flops(self, counted: int, model: int, shards: int) -> int:
        """Operations of all devices' matrix products in a step.

        Args:
          counted: those in the traced step, each time a loop comes by.
          model: those of the forward and backward passes, without recomputation.
          shards: data shards.
        """
        ...


def make_execution(
    network: Network,
    mesh: Mesh,
    schedule: str | Schedule,
    accumulate: int,
    block: BlockWork | None,
) -> Execution:
    """Choose how a model runs on a mesh.

    Args:
      network: the model.
      mesh: the mesh.
      schedule: a name of `jaxpar.pipeline.schedules.catalog`, or a table.
      accumulate: micro-batches.
      block: what a block costs, traced; of a PipelineModel on several stages.

    Returns:
      What the engine asks.

    Raises:
      ValueError: if the mesh has several stages and the model is no PipelineModel, has
        too few blocks; or if the schedule does not fit, or, chosen by name, gains
        nothing by splitting the backward.
    """
    num_stages = mesh.shape[PIPE]
    made = make_schedule(schedule, num_stages, accumulate)
    if num_stages == 1:
        return OneStage()
    if not isinstance(network, PipelineNetwork):
        raise ValueError(
            f"mesh: pipe={num_stages} needs a model that can be cut into stages: give "
            "model=jaxpar.PipelineModel(embed=..., block=..., num_blocks=..., "
            "head=...), or use pipe=1."
        )
    stages = Stages(network.num_blocks, num_stages, made.num_chunks)
    if network.num_blocks < stages.num_virtual:
        chunks = f" x {made.num_chunks} chunks" if made.num_chunks > 1 else ""
        raise ValueError(
            f"mesh: pipe={num_stages}{chunks} cuts the trunk into {stages.num_virtual} "
            f"pieces, but the model has num_blocks={network.num_blocks}; use at most "
            f"pipe={network.num_blocks // made.num_chunks or 1}."
        )
    assert block is not None, "traced where there are stages"
    if made.splits_backward and isinstance(schedule, str):
        check_split(made, block.deferred)
    return Pipeline(network, made, stages, block)


class OneStage:
    """No pipeline: the loss function runs as it is."""

    bubble = 0.0
    active_fraction = 1.0
    schedule: Schedule | None = None
    times: Mapping[str, float] = MappingProxyType({})
    shard_leaves = staticmethod(shard_leaves)
    make_gradients = staticmethod(make_gradients)
    make_evaluation = staticmethod(make_evaluation)
    make_forward = staticmethod(make_forward)

    def crossing(self, leaf_shardings: Sequence[LeafSharding]) -> list[LeafSharding]:
        """They cross as they are."""
        return list(leaf_shardings)

    def notes(
        self, zero: ZeroStage, leaf_shardings: Mapping[str, LeafSharding]
    ) -> tuple[str, ...]:
        """Nothing to say."""
        del zero, leaf_shardings
        return ()

    def flops(self, counted: int, model: int, shards: int) -> int:
        """All that is traced is run."""
        del model, shards
        return counted
