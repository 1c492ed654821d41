"""Are halves of a device's rows computed side by side, and why not?

With tensor parallelism every layer waits for sums over devices; the two halves don't
wait for each other (`jaxpar.step.halves`).
"""

import dataclasses

from jax.sharding import Mesh

from jaxpar.engine.batches import BatchSpec
from jaxpar.mesh import PIPE, TENSOR
from jaxpar.step.inputs import Packed
from jaxpar.step.partition import Partition


@dataclasses.dataclass(frozen=True)
class Halves:
    """Whether a loss is called for halves of a device's rows.

    Attributes:
      asked: whether it should be.
      reason: why it can't be; None if it can.
    """

    asked: bool = False
    reason: str | None = None

    @property
    def times(self) -> int:
        """Calls of the loss function for a device's rows of a micro-batch."""
        return 2 if self.asked and self.reason is None else 1

    def applied(self, partition: Partition, *, averages: bool) -> Partition:
        """The partition that computes halves, if the loss allows it.

        Args:
          partition: how the loss function is run on shards.
          averages: whether the loss calls `jaxpar.batch_mean`.
        """
        can = self.times == 2 and not partition.coupled and not averages
        return dataclasses.replace(partition, halves=can)

    def notes(self, partition: Partition) -> tuple[str, ...]:
        """A line for `Engine.explain`, if halves are asked for."""
        if not self.asked:
            return ()
        if partition.halves:
            done = "each device computes the two halves of its rows side by side"
            return (f"two_batch_overlap: {done}.",)
        reason = self.reason or "the loss couples the rows of a micro-batch"
        return (f"two_batch_overlap: off, because {reason}.",)


NOT_HALVED = Halves()


def halves_of(
    asked: bool | None, mesh: Mesh, batch: BatchSpec, accumulate: int
) -> Halves:
    """Decide from the shapes; by default on GPUs that a tensor axis joins.

    Args:
      asked: ``two_batch_overlap`` of `jaxpar.initialize`.
      mesh: the mesh.
      batch: the shapes of a global batch.
      accumulate: micro-batches a step.
    """
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    wanted = on_gpus and mesh.shape[TENSOR] > 1 if asked is None else asked
    return Halves(wanted, _why_not(mesh, batch, accumulate))


def _why_not(mesh: Mesh, batch: BatchSpec, accumulate: int) -> str | None:
    if mesh.shape[PIPE] > 1:
        return "a pipeline's micro-batches are computed one by one"
    if isinstance(batch.rows(1), Packed):
        return "packs are computed one by one"
    rows = batch.num_rows // batch.num_calls(accumulate)
    if rows % 2:
        return f"the rows of a device's micro-batch are an odd number, {rows}"
    return None
