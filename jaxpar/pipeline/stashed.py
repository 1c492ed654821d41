"""PipeDream-2BW: what is stashed of the parameters, and who uses it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxpar.pipeline.asynchronous import AsynchronousPipeline
from jaxpar.pipeline.versions import Stashed
from jaxpar.step.carried import Carried, Stepped
from jaxpar.step.partition import Partition
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class StashedPipeline(AsynchronousPipeline):
    """A batch uses one version of the parameters, forwards and backwards.

    See `jaxpar.pipeline.schedules.asynchronous.PipeDream2BW`.
    """

    batches = Stashed

    def delays(self) -> tuple[float, float]:
        """See `AsynchronousPipeline`."""
        return 1.0, 1.0

    def part_of_second(
        self, params: Params, partition: Partition
    ) -> tuple[Carried, ...]:
        """See `AsynchronousPipeline`."""
        del params
        return (ParamsBefore(partition.precision.compute_dtype),)

    def second(
        self, params: Params, carry: Mapping[str, PyTree], partition: Partition
    ) -> Params:
        """See `AsynchronousPipeline`."""
        del params, partition
        return carry[ParamsBefore.name]


@dataclasses.dataclass(frozen=True)
class ParamsBefore(Carried):
    """The parameters before the last step, in the dtype that steps compute in.

    Attributes:
      dtype: that dtype.
    """

    dtype: Any
    name: str = "params_before"
    saved: bool = False
    in_gradients: bool = True

    def init(self, params: Params) -> Params:
        """The parameters."""
        return jax.tree.map(lambda x: x.astype(self.dtype), params)

    def after(self, part: Params, stepped: Stepped) -> Params:
        """See the class."""
        del part
        return self.init(stepped.before)
