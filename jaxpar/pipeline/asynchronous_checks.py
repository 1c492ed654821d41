"""What can't an asynchronous schedule be combined with, and what is the remedy?"""

import jax

from jaxpar.pipeline.schedules.asynchronous import Asynchronous
from jaxpar.step.inputs import replicated_names
from jaxpar.step.partition import Partition
from jaxpar.step.update import HostUpdate, Update
from jaxpar.types import Batch


def check_asynchronous(
    kind: Asynchronous, partition: Partition, update: Update, batch: Batch
) -> None:
    """Check what is combined with an asynchronous schedule.

    Args:
      kind: the schedule.
      partition: how the loss function is run from shards.
      update: the optimizer.
      batch: the shapes of a global batch.

    Raises:
      ValueError: if the combination is not defined, or not built.
    """
    name, zero = f"schedule={kind.name!r}", partition.zero.number
    if zero >= 2:
        raise ValueError(
            f"zero={zero}: {name} keeps the gradients of batches that overlap on the "
            "stages until the oldest ends, so that none can be reduced and sharded "
            "before; use zero=1, or schedule='1f1b'."
        )
    if partition.precision.scales_loss:
        raise ValueError(
            f"precision='fp16': with {name} the loss scale would change while batches "
            "that were scaled by it are under way; use precision='bf16', or "
            "schedule='1f1b'."
        )
    if isinstance(update, HostUpdate) or update.fetched:
        raise ValueError(
            f"offload: {name} has updates on the devices alone; use "
            "Offload(optimizer='host', update='device'), or schedule='1f1b'."
        )
    reduction = update.reduction
    carried = jax.eval_shape(lambda: reduction.init(partition.leaves))
    if jax.tree.leaves(carried) or reduction.apart or reduction.clips_itself:
        raise ValueError(
            f"optimizer: {type(reduction).__name__} keeps something of every data "
            f"shard from step to step, as {name} does, and the two are not combined; "
            "use another optimizer, or schedule='1f1b'."
        )
    if names := replicated_names(batch):
        first = min(names).removesuffix("/value")
        raise ValueError(
            f"sample_batch: {first!r} is jaxpar.Replicated, and with {name} the "
            "micro-batches of a tick are of several batches; give it a row for each "
            "example, or use schedule='1f1b'."
        )
