"""How is a loss function run over the pipe axis: on one stage, or by a schedule?

The engine gets gradients and evaluation from an `Execution`, chosen by the mesh.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpar.mesh import PIPE
from jaxpar.model.bridge import Network
from jaxpar.model.network import PipelineNetwork
from jaxpar.pipeline.asynchronous import AsynchronousPipeline
from jaxpar.pipeline.between_steps import NothingBetweenSteps
from jaxpar.pipeline.block_cost import BlockWork, check_split
from jaxpar.pipeline.corrected import CorrectedPipeline
from jaxpar.pipeline.gradients import Pipeline
from jaxpar.pipeline.schedules.asynchronous import Asynchronous, PipeMare
from jaxpar.pipeline.schedules.catalog import (
    asynchronous,
    chunks_of,
    make_schedule,
    with_chunks,
)
from jaxpar.pipeline.schedules.table import Schedule, check_schedule
from jaxpar.pipeline.stages import Division, divide
from jaxpar.pipeline.stashed import StashedPipeline
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import Spec
from jaxpar.sharding.zero import ZeroStage, shard_leaves
from jaxpar.step.carried import Carried
from jaxpar.step.evaluation import make_evaluation, make_forward
from jaxpar.step.gradients import make_gradients
from jaxpar.step.loss import Loss, Sums
from jaxpar.step.partition import Partition
from jaxpar.step.train_step import Pace
from jaxpar.step.update import Update
from jaxpar.tree import named_leaves, num_elements
from jaxpar.types import Batch, Params, PyTree

MOST_UNEVEN = 1.25
"""Parameters of blocks on a stage, by those of an even division, without asking."""


@runtime_checkable
class Execution(Protocol):
    """How a model is run over the pipe axis."""

    @property
    def delay(self) -> int:
        """See `NothingBetweenSteps`."""
        ...

    @property
    def synchronous_steps(self) -> int:
        """See `NothingBetweenSteps`."""
        ...

    @property
    def versions(self) -> int:
        """See `NothingBetweenSteps`."""
        ...

    @property
    def pace(self) -> Pace | None:
        """See `NothingBetweenSteps`."""
        ...

    def parts(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        batch: Batch,
        update: Update,
    ) -> tuple[Carried, ...]:
        """See `NothingBetweenSteps`."""
        ...

    def took_batch(self, carry: Mapping[str, PyTree]) -> jax.Array | bool:
        """See `NothingBetweenSteps`."""
        ...

    def shard_leaves(
        self,
        leaves: Mapping[str, jax.ShapeDtypeStruct],
        compute: Mapping[str, Spec],
        zero: ZeroStage,
        sizes: Mapping[str, int],
        allow_whole: Sequence[str],
    ) -> dict[str, LeafSharding]:
        """See `jaxpar.sharding.zero.shard_leaves`."""
        ...

    def make_gradients(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        accumulate: int,
    ) -> Callable[..., tuple[Params, Sums, PyTree, PyTree]]:
        """See `jaxpar.step.gradients.make_gradients`."""
        ...

    def make_evaluation(
        self, partition: Partition, loss: Loss, like: tuple[Params, Params]
    ) -> Callable[..., Sums]:
        """See `jaxpar.step.evaluation.make_evaluation`."""
        ...

    def make_forward(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        *,
        training: bool,
    ) -> Callable[..., Sums]:
        """See `jaxpar.step.evaluation.make_forward`."""
        ...

    def communicated_shardings(
        self, leaf_shardings: Sequence[LeafSharding]
    ) -> list[LeafSharding]:
        """The shardings in which parameters are gathered and gradients reduced."""
        ...

    def notes(
        self,
        zero: ZeroStage,
        leaf_shardings: Mapping[str, LeafSharding],
        frozen: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Lines about the pipe axis for `Engine.explain`.

        Args:
          zero: the row of the ZeRO table.
          leaf_shardings: name -> sharding, of all parameters.
          frozen: the names of those that are not trained.
        """
        ...

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a device is idle, by the schedule."""
        ...

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline schedule; None without a pipeline."""
        ...

    @property
    def times(self) -> Mapping[str, float]:
        """The time of each kind of work, in forwards of a stage."""
        ...

    @property
    def active_fraction(self) -> float:
        """Fraction of the ticks in which a stage has a forward (or backward)."""
        ...

    def flops(self, counted: int, model: int, shards: int) -> int:
        """FLOPs of the matmuls of a step, on all devices.

        Args:
          counted: FLOPs of the traced step, with loops at their trip counts.
          model: FLOPs of the forward and backward passes, without recomputation.
          shards: data shards.
        """
        ...


def make_execution(
    network: Network,
    mesh: Mesh,
    schedule: str | Schedule | Asynchronous,
    accumulate: int,
    block: BlockWork | None,
) -> Execution:
    """Choose how a model runs on a mesh.

    Args:
      network: the model.
      mesh: the mesh.
      schedule: a name of `jaxpar.pipeline.schedules.catalog`, or a table.
      accumulate: micro-batches.
      block: the traced cost of a block; None unless a PipelineModel has several stages.

    Returns:
      The execution.

    Raises:
      ValueError: if the mesh has several stages and the model is not a PipelineModel or
        has too few blocks, if the schedule does not fit, or if a schedule chosen by
        name splits the backward without a gain.
    """
    num_stages = mesh.shape[PIPE]
    make_schedule(schedule, num_stages, accumulate)  # It may raise.
    if num_stages == 1:
        return OneStage()
    if not isinstance(network, PipelineNetwork):
        raise ValueError(
            f"mesh: pipe={num_stages} needs a model that can be cut into stages: give "
            "model=jaxpar.PipelineModel(embed=..., sections=[(block, count)], "
            "head=...), or use pipe=1."
        )
    if (late := asynchronous(schedule)) is not None:
        return _asynchronous(network, late, num_stages, accumulate, block)
    assert not isinstance(schedule, Asynchronous), "returned above"
    counts = {section.name: section.num_blocks for section in network.sections}
    chunks = chunks_of(schedule, len(counts))
    division = divide(counts, num_stages, chunks)
    _check_division(network, division, chunks)
    made = with_chunks(schedule, num_stages, accumulate, division.num_chunks)
    _check_order(network, made)
    assert block is not None, "traced if there are several stages"
    if made.splits_backward and isinstance(schedule, str):
        check_split(made, block.deferred)
    return Pipeline(network, made, division, block)


def _asynchronous(
    network: PipelineNetwork,
    kind: Asynchronous,
    num_stages: int,
    accumulate: int,
    block: BlockWork | None,
) -> AsynchronousPipeline:
    """A schedule whose batches are under way between steps.

    Raises:
      ValueError: if it can't run the model.
    """
    if len(network.sections) > 1:
        raise ValueError(
            f"schedule={kind.name!r} runs models of one section of blocks, and this "
            f"one has {len(network.sections)}; use schedule='1f1b'."
        )
    _, state = jax.eval_shape(network.init, jax.random.key(0))
    if jax.tree.leaves(state):
        raise ValueError(
            f"schedule={kind.name!r}: the model has mutable state "
            f"({next(iter(named_leaves(state)))}), which batches that overlap would "
            "change out of order; use schedule='1f1b'."
        )
    counts = {section.name: section.num_blocks for section in network.sections}
    division = divide(counts, num_stages, 1)
    _check_division(network, division, 1)
    assert block is not None, "traced if there are several stages"
    table = kind.table(num_stages, accumulate)
    given = network, table, division, block
    if isinstance(kind, PipeMare):
        return CorrectedPipeline(*given, kind)
    return StashedPipeline(*given, kind)


def _check_division(network: PipelineNetwork, division: Division, chunks: int) -> None:
    """Raise for blocks that the stages can't divide, or only very unevenly."""
    P, model = division.num_stages, network.num_blocks
    largest = max(own.num_blocks for own in division.sections)
    if len(division.sections) > 1:
        chunks = 1  # A section of few blocks has fewer.
    if largest < P or (len(division.sections) == 1 and model < P * chunks):
        parts = f"{P} x {chunks} chunks" if chunks > 1 else f"{P}"
        counts = ", ".join(f"{own.name}: {own.num_blocks}" for own in division.sections)
        raise ValueError(
            f"mesh: pipe={parts} cuts a section into {P * chunks} parts, but the "
            f"model has too few blocks ({counts}); use at most "
            f"pipe={largest // chunks or 1}."
        )
    _check_hidden(network, P)
    params, _ = jax.eval_shape(network.init, jax.random.key(0))
    sizes = [num_elements(params[own.name]) for own in division.sections]
    even = sum(sizes)
    cut = sum(
        size / own.num_blocks * own.num_virtual * own.places
        for size, own in zip(sizes, division.sections, strict=True)
    )
    if cut > MOST_UNEVEN * even and not network.allow_uneven:
        uneven = ", ".join(
            f"{own.name}: {own.num_blocks} blocks on {own.num_virtual} virtual stages"
            for own in division.sections
            if own.idle_places
        )
        raise ValueError(
            f"mesh: pipe={P} can't divide the blocks evenly ({uneven}): every stage "
            f"would hold {cut / even:.2f} x the parameters of an even division, more "
            f"than {MOST_UNEVEN}. Change the mesh, the schedule or the counts, or "
            "pass PipelineModel(allow_uneven=True)."
        )


def _check_order(network: PipelineNetwork, schedule: Schedule) -> None:
    """Raise for a schedule that would change mutable state out of order."""
    _, state = jax.eval_shape(network.init, jax.random.key(0))
    ticks = check_schedule(schedule).forward
    late = np.argwhere(np.diff(ticks, axis=0) < 0)
    if state and len(late):
        m, g = (int(x) for x in late[0])
        chunk, stage = divmod(g, schedule.num_stages)
        raise ValueError(
            f"schedule={schedule.name!r}: stage {stage}, chunk {chunk} runs the "
            f"forward of micro-batch {m + 1} before that of {m}, but the model has "
            f"mutable state ({next(iter(named_leaves(state)))}), which one device "
            "changes in the order of the micro-batches; order each chunk's forwards by "
            "micro-batch."
        )


def _check_hidden(network: PipelineNetwork, num_stages: int) -> None:
    """Raise for hidden states that have no gradient to send back."""
    for section in network.sections:
        for name, leaf in named_leaves((section.before, section.hidden)).items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"mesh: pipe={num_stages}: the hidden state at {section.name} has "
                    f"{leaf.dtype} at {name.split('/', 1)[-1]!r}, but stages send "
                    "floating arrays alone. Pass it to the parts that need it by "
                    "keyword: loss_fn calls model(inputs, mask=...)."
                )


class OneStage(NothingBetweenSteps):
    """No pipeline: the loss function runs as it is."""

    bubble = 0.0
    active_fraction = 1.0
    schedule: Schedule | None = None
    times: Mapping[str, float] = MappingProxyType({})
    shard_leaves = staticmethod(shard_leaves)
    make_gradients = staticmethod(make_gradients)
    make_evaluation = staticmethod(make_evaluation)
    make_forward = staticmethod(make_forward)

    def communicated_shardings(
        self, leaf_shardings: Sequence[LeafSharding]
    ) -> list[LeafSharding]:
        """The shardings unchanged."""
        return list(leaf_shardings)

    def notes(
        self,
        zero: ZeroStage,
        leaf_shardings: Mapping[str, LeafSharding],
        frozen: Collection[str] = (),
    ) -> tuple[str, ...]:
        """No lines."""
        del zero, leaf_shardings, frozen
        return ()

    def flops(self, counted: int, model: int, shards: int) -> int:
        """`counted`: everything that is traced is run."""
        del model, shards
        return counted
