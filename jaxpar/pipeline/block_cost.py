"""What does a pipeline block cost, and how much of its backward can be deferred?"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import jax

from jaxpar import tree
from jaxpar.jaxprs.evaluate import flops
from jaxpar.model.axis_names import unbound_axis
from jaxpar.model.network import PipelineNetwork
from jaxpar.pipeline.backward import trace_pullback
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import Cost, Schedule, cost
from jaxpar.pipeline.sections import Sections
from jaxpar.pipeline.stage_functions import StageFunctions
from jaxpar.pipeline.stages import divide
from jaxpar.step.inputs import Inputs
from jaxpar.step.loss import Loss
from jaxpar.step.row_draws import AsTraced, ShardKey
from jaxpar.types import Params


@dataclasses.dataclass(frozen=True)
class BlockWork:
    """One block's work on a micro-batch of one data shard.

    Attributes:
      flops: FLOPs of the forward's matmuls.
      deferred: fraction of the backward's FLOPs that only weight gradients need.
    """

    flops: int
    deferred: float


def trace_microbatch(
    network: PipelineNetwork,
    loss: Loss,
    rows: Inputs,
    trained: Callable[[Params], Collection[str]] = tree.named_leaves,
) -> BlockWork:
    """Trace embedding, blocks and head; raise for what a pipeline can't run.

    Args:
      network: the model.
      loss: the loss function.
      rows: shapes of one micro-batch on one data shard.
      trained: the names of the parameters that are trained, from all parameters.

    Returns:
      The work of a block, the mean of all.

    Raises:
      ValueError: if loss_fn calls the model twice, or uses an unbound axis name.
    """
    counts = {section.name: section.num_blocks for section in network.sections}
    division = divide(counts, 1, 1)
    found: list[BlockWork] = []

    def run(key: jax.Array, rows: Inputs) -> None:
        params, state = network.init(key)
        given = {"training": True, "platform": "", "draws": AsTraced()}
        names = frozenset(trained(params))
        functions = StageFunctions(network, loss, 1, **given, trained=names)
        whole = Sections(functions, division, keeps=False, splits=False)
        shard_key = ShardKey(key, jax.numpy.int32(0))
        first = jax.numpy.int32(0)
        own = params["embed"], state.get("embed", {})
        hidden, _ = functions.embed(own, rows, first, shard_key)
        for own in (chunks.functions for chunks in whole.chunks):
            section = own.section
            if section.between is not None:
                name = section.between_name
                joint = params[name], state.get(name, {})
                hidden, _ = own.between(joint, hidden, rows, first, shard_key)
            places, others = own.places(first, rows, first, shard_key)
            stacks = own.parted(params[section.name]), state.get(section.name, {})
            first_of = jax.tree.map(lambda x: x[0], (*stacks[0], stacks[1], *places))
            arguments = (first_of[0], hidden, *first_of[1:], *others)
            block_of = own.block_on(rows)
            forward = jax.make_jaxpr(block_of)(*arguments)
            deferred = trace_pullback(block_of, *arguments).deferred
            found.append(BlockWork(flops(forward.eqns), deferred))
        shared = (params["head"], network.tied(params["embed"]))
        head = shared, state.get("head", {})
        functions.head(head, hidden, rows, first, shard_key)

    try:
        jax.eval_shape(run, jax.random.key(0), rows)
    except NameError as error:
        if (name := unbound_axis(error)) is None:
            raise
        raise ValueError(
            f"loss_fn: axis name {name!r} is not bound, and a pipeline does not bind "
            "it. Remove it from the model and the loss, and pass coupled_batch=True if "
            "it stood for all examples of a micro-batch; or use pipe=1."
        ) from error
    return _mean(found, list(counts.values()))


def _mean(found: Sequence[BlockWork], counts: Sequence[int]) -> BlockWork:
    """The mean over all blocks; what is deferred, weighted by FLOPs."""
    total = sum(n * work.flops for n, work in zip(counts, found, strict=True))
    deferred = sum(
        n * work.flops * work.deferred for n, work in zip(counts, found, strict=True)
    )
    return BlockWork(round(total / sum(counts)), deferred / (total or 1))


def check_split(schedule: Schedule, deferred: float) -> None:
    """Raise for a split backward that saves no time.

    Args:
      schedule: a schedule that splits the backward.
      deferred: as in `BlockWork`.

    Raises:
      ValueError: if the schedule is not faster than 1F1B.
    """
    plain = make_schedule("1f1b", schedule.num_stages, schedule.num_microbatches)
    if cost_of(schedule, deferred).total < cost(plain).total:
        return
    raise ValueError(
        f"schedule={schedule.name!r}: only {deferred:.0%} of the block's backward can "
        "be deferred, because its weight gradients are not separate matmuls (such as "
        "inside jax.lax.scan) or its weights are not trained. It would be as slow as "
        "'1f1b' and use more memory. Use '1f1b', or pass the table to run it anyway: "
        f"schedule=jaxpar.make_schedule({schedule.name!r}, "
        f"{schedule.num_stages}, {schedule.num_microbatches})."
    )


def times_of(schedule: Schedule, deferred: float) -> dict[str, float]:
    """The time of each kind of work, in forwards; a full backward takes two.

    Args:
      schedule: the schedule.
      deferred: as in `BlockWork`.

    Returns:
      "forward", "backward" and "weight" -> time.
    """
    apart = 2 * deferred if schedule.splits_backward else 0.0
    return {"forward": 1.0, "backward": 2 - apart, "weight": apart}


def cost_of(schedule: Schedule, deferred: float) -> Cost:
    """The cost of a schedule, by `times_of`."""
    return cost(schedule, **times_of(schedule, deferred))
