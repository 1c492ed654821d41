"""How much work is a block of a pipeline, and how much of its backward can wait?"""

import dataclasses

import jax

from jaxpar.jaxprs.evaluate import flops
from jaxpar.model.axis_names import unbound_axis
from jaxpar.model.network import PipelineNetwork
from jaxpar.pipeline.backward import trace_pullback
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import Cost, Schedule, cost
from jaxpar.pipeline.stage_functions import StageFunctions
from jaxpar.pipeline.stages import Stages
from jaxpar.step.inputs import Inputs
from jaxpar.step.loss import Loss
from jaxpar.step.row_draws import AsTraced, ShardKey


@dataclasses.dataclass(frozen=True)
class BlockWork:
    """One block's work on a micro-batch of one data shard.

    Attributes:
      flops: operations of the forward's matrix products.
      deferred: fraction of the backward that makes gradients of weights alone.
    """

    flops: int
    deferred: float


def trace_microbatch(network: PipelineNetwork, loss: Loss, rows: Inputs) -> BlockWork:
    """Trace the parts, and refuse what a pipeline can't run.

    Args:
      network: the model.
      loss: the loss function.
      rows: shapes of one micro-batch on one data shard.

    Returns:
      The work of a block.

    Raises:
      ValueError: if loss_fn calls the model twice, or uses an axis name that nothing
        binds.
    """
    functions = StageFunctions(
        network,
        loss,
        Stages(network.num_blocks, 1, 1),
        1,
        training=True,
        platform="",
        draws=AsTraced(),
    )
    found: list[BlockWork] = []

    def run(key: jax.Array, rows: Inputs) -> None:
        params, _ = network.init(key)
        shard_key = ShardKey(key, jax.numpy.int32(0))
        first = jax.numpy.int32(0)
        hidden = functions.embed(params["embed"], rows, first, shard_key)
        shared = (params["head"], network.tied(params["embed"]))
        functions.head(shared, hidden, rows, first, shard_key)
        own, others = functions.places(first, rows, first, shard_key)
        block, own = jax.tree.map(lambda x: x[0], (params["blocks"], own))
        arguments = (block, hidden, *own, *others)
        block_of = functions.block_on(rows)
        forward = jax.make_jaxpr(block_of)(*arguments)
        deferred = trace_pullback(block_of, *arguments).deferred
        found.append(BlockWork(flops(forward.eqns), deferred))

    try:
        jax.eval_shape(run, jax.random.key(0), rows)
    except NameError as error:
        if (name := unbound_axis(error)) is None:
            raise
        raise ValueError(
            f"loss_fn: axis name {name!r} is bound by nothing, and a pipeline binds "
            "none for it. Leave it out of the model and the loss, with "
            "coupled_batch=True where it was to take in all examples of a micro-batch; "
            "or use pipe=1."
        ) from error
    return found[0]


def check_split(schedule: Schedule, deferred: float) -> None:
    """Refuse to split a backward that cannot be.

    Args:
      schedule: one that splits.
      deferred: as of `BlockWork`.

    Raises:
      ValueError: if it takes as long as 1F1B.
    """
    plain = make_schedule("1f1b", schedule.num_stages, schedule.num_microbatches)
    if cost_of(schedule, deferred).total < cost(plain).total:
        return
    raise ValueError(
        f"schedule={schedule.name!r}: {deferred:.0%} of the block's backward can wait, "
        "for its gradients of weights are not matrix products of their own (as inside "
        "jax.lax.scan), so that it would take as long as '1f1b' and more memory. Use "
        "'1f1b', or give the table itself to have it anyway: "
        f"schedule=jaxpar.make_schedule({schedule.name!r}, "
        f"{schedule.num_stages}, {schedule.num_microbatches})."
    )


def times_of(schedule: Schedule, deferred: float) -> dict[str, float]:
    """What each kind of work takes, in forwards, where a backward takes two.

    Args:
      schedule: the schedule.
      deferred: as of `BlockWork`.

    Returns:
      "forward", "backward" and "weight" -> time.
    """
    apart = 2 * deferred if schedule.splits_backward else 0.0
    return {"forward": 1.0, "backward": 2 - apart, "weight": apart}


def cost_of(schedule: Schedule, deferred: float) -> Cost:
    """The cost of a schedule, by `times_of`."""
    return cost(schedule, **times_of(schedule, deferred))
