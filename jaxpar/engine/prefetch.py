"""Which loops gather the next layer while one computes, and what does that ask for?

Collectives run beside kernels on GPUs. A loop that gathers a layer ahead, in one
collective, then waits for the first layer alone (`jaxpar.jaxprs.layer_loop`).
"""

import dataclasses
import math
from collections.abc import Sequence

from jax.extend import core

from jaxpar.mesh import PIPE
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.loops import loops_over
from jaxpar.step.partition import Partition
from jaxpar.step.reduction import PlainReduction

Loops = Sequence[tuple[int, Sequence[LeafSharding]]]
"""By loop, its layers, and the parameters that it gathers, with all layers."""


def prefetching(
    partition: Partition, jaxpr: core.Jaxpr, asked: bool | None, accumulate: int
) -> tuple[Partition, Loops]:
    """Decide which loops gather ahead; without any, the partition stays as it is.

    ZeRO 1 and 2 then gather, and reduce, by layer as well, if a step is one micro-batch
    and its gradients are reduced as they are; and replicas are summed over by layer.

    Args:
      partition: how the loss function is run on shards.
      jaxpr: the loss's; its inputs are a key, the parameters, and others.
      asked: as in `jaxpar.initialize`.
      accumulate: micro-batches a step.
    """
    wanted = partition.platform == "gpu" if asked is None else asked
    several_stages = partition.mesh.shape[PIPE] > 1
    if not wanted or partition.automatic or several_stages:
        return partition, ()
    plain = isinstance(partition.reduction, PlainReduction)
    once = plain and accumulate == 1
    zero = partition.zero.by_layer if once else partition.zero
    loops = _loops(jaxpr, partition)
    if zero.gather != "use" or not loops:
        return partition, ()
    at_once = accumulate == 1 and not zero.over_replicas
    at_once &= type(partition.reduction) is PlainReduction
    ahead = dataclasses.replace(
        partition, zero=zero, prefetch=True, replicas_at_once=at_once
    )
    return ahead, loops


def _loops(jaxpr: core.Jaxpr, partition: Partition) -> Loops:
    """The loops over layers that data splits."""
    leaves = partition.all_on_shard
    given = zip(jaxpr.invars[1 : 1 + len(leaves)], leaves, strict=True)
    split = {var: leaf for var, leaf in given if leaf.is_split}
    return [(length, own) for length, own in loops_over(jaxpr, split) if length > 1]


def layer_bytes(loops: Loops, partition: Partition) -> int:
    """Bytes of the largest layer that a loop gathers, unsharded over data."""
    precision = partition.precision
    widest = max(precision.compute_dtype.itemsize, precision.reduce_dtype.itemsize)
    return widest * max((_elements(*loop) for loop in loops), default=0)


def loop_notes(loops: Loops) -> tuple[str, ...]:
    """A line on each loop for `Engine.explain`."""
    return tuple(
        f"prefetch: {length} layers ({own[0].name}, ...: {len(own)} parameters) are "
        "gathered one ahead, while the one before computes."
        for length, own in loops
    )


def _elements(length: int, own: Sequence[LeafSharding]) -> int:
    return sum(math.prod(leaf.shape) // leaf.ways_placed for leaf in own) // length
