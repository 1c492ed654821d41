"""What is there between the steps of a schedule: nothing, unless it is asynchronous."""

from collections.abc import Mapping

import jax

from jaxpar.step.carried import Carried
from jaxpar.step.loss import Loss
from jaxpar.step.partition import Partition
from jaxpar.step.train_step import Pace
from jaxpar.step.update import Update
from jaxpar.types import Batch, Params, PyTree


class NothingBetweenSteps:
    """A step ends what it begins."""

    @property
    def delay(self) -> int:
        """Steps that a batch's work goes on for after its own."""
        return 0

    @property
    def synchronous_steps(self) -> int:
        """Steps at the beginning that end before the next one begins."""
        return 0

    @property
    def versions(self) -> int:
        """Versions of the trained parameters that a step gathers."""
        return 1

    @property
    def pace(self) -> Pace | None:
        """How updates are slowed down; None for not at all."""
        return None

    def parts(
        self,
        partition: Partition,
        loss: Loss,
        like: tuple[Params, Params],
        batch: Batch,
        update: Update,
    ) -> tuple[Carried, ...]:
        """What is carried from step to step.

        Args:
          partition: how the loss function is run from shards.
          loss: the loss function.
          like: of the structure of `TrainState.weights`.
          batch: the shapes of a global batch.
          update: the optimizer.

        Raises:
          ValueError: if the schedule can't run with these.
        """
        del partition, loss, like, batch, update
        return ()

    def took_batch(self, carry: Mapping[str, PyTree]) -> jax.Array | bool:
        """Whether a step's gradients are those of a batch, by what is carried to it."""
        del carry
        return True
