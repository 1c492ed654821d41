"""PipeMare: how backwards are corrected, and updates slowed down, by stage."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar import tree
from jaxpar.pipeline.asynchronous import AsynchronousPipeline
from jaxpar.pipeline.in_flight import PART
from jaxpar.pipeline.schedules.asynchronous import PipeMare
from jaxpar.pipeline.versions import Corrected
from jaxpar.step.carried import Carried, Stepped
from jaxpar.step.partition import Partition
from jaxpar.step.train_step import Pace
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class CorrectedPipeline(AsynchronousPipeline):
    """Forwards use the newest parameters, backwards those that are corrected.

    See `jaxpar.pipeline.schedules.asynchronous.PipeMare`.
    """

    kind: PipeMare

    batches = Corrected

    @property
    def recomputes(self) -> bool:
        """See `Pipeline`: residuals would be of the parameters of the forward."""
        return True

    def _schedule_lines(self) -> tuple[str, ...]:
        lines = super()._schedule_lines()
        if self.network.remat != "none":
            return lines
        return (
            *lines,
            f"pipe: {self.schedule.name}: a backward runs its blocks again, from their "
            "saved input, with corrected parameters.",
        )

    def delays(self) -> tuple[float, float]:
        """See `AsynchronousPipeline`."""
        delays = self._forward_delays
        return float(delays.min()), float(delays.max())

    def part_of_second(
        self, params: Params, partition: Partition
    ) -> tuple[Carried, ...]:
        """See `AsynchronousPipeline`."""
        del partition
        if self.kind.decay is None:
            return ()
        late = self._discrepancies
        # Where nothing is late, the average isn't read.
        weights = self.kind.decay ** (1 / np.where(late > 0, late, 1.0))
        return (MeanUpdate(self._of_leaves(params, weights)),)

    def second(
        self, params: Params, carry: Mapping[str, PyTree], partition: Partition
    ) -> Params:
        """See `AsynchronousPipeline`."""
        dtype = partition.precision.compute_dtype
        if self.kind.decay is None:
            return jax.tree.map(lambda x: x.astype(dtype), params)

        def correct(late: np.ndarray, x: jax.Array, mean: jax.Array) -> jax.Array:
            return (x - late * mean).astype(dtype)

        late = self._of_leaves(params, self._discrepancies)
        return _by_leaf(correct, late, params, carry[MeanUpdate.name])

    @property
    def pace(self) -> Pace | None:
        """See `NothingBetweenSteps`: by the delay of each stage."""
        if self._forward_delays.max() <= 1 or not self.kind.annealing_steps:
            return None
        return self._paced

    def _paced(self, before: Params, after: Params, step: jax.Array) -> Params:
        left = 1 - jnp.minimum(step / self.kind.annealing_steps, 1.0)

        def pace(delay: np.ndarray, before: jax.Array, after: jax.Array) -> jax.Array:
            return before + np.maximum(delay, 1.0) ** -left * (after - before)

        delays = self._of_leaves(after, self._forward_delays)
        return _by_leaf(pace, delays, before, after)

    @property
    def _stages(self) -> np.ndarray:
        return np.arange(self.schedule.num_stages)

    @property
    def _forward_delays(self) -> np.ndarray:
        """By stage: updates between a forward and that of its batch."""
        return self.kind.forward_delay(self._stages, self.schedule)

    @property
    def _discrepancies(self) -> np.ndarray:
        """By stage: updates between a forward and its backward."""
        return self.kind.discrepancy(self._stages, self.schedule)

    def _of_leaves(self, params: Params, by_stage: np.ndarray) -> dict[str, np.ndarray]:
        """Values by leaf: those of its blocks' stages, or of its own, fp32."""
        found, by_stage = {}, by_stage.astype(np.float32)
        for name, leaf in tree.named_leaves(params).items():
            stages = self.division.of(name)
            if stages is not None:
                own = np.repeat(by_stage, stages.counts)
            else:
                own = by_stage[-1:] if name.startswith("head/") else by_stage[:1]
            found[name] = own.reshape(-1, *[1] * (leaf.ndim - 1))
        return found


@dataclasses.dataclass(frozen=True)
class MeanUpdate(Carried):
    """A moving average of the updates of each parameter, while batches are under way.

    Attributes:
      weights: leaf -> the weights of the average so far, broadcast to the leaf; the
        new update's are 1 less those.
    """

    weights: Mapping[str, np.ndarray]
    name: str = "mean_update"
    saved: bool = False
    in_gradients: bool = True

    def init(self, params: Params) -> Params:
        """No update."""
        return jax.tree.map(jnp.zeros_like, params)

    def at_new_params(self, part: Params) -> Params:
        """No update."""
        return self.init(part)

    def after(self, part: Params, stepped: Stepped) -> Params:
        """With the step's update; empty if nothing is under way any more."""
        is_some = jnp.any(stepped.carry[PART].is_there)

        def mean(weight: np.ndarray, old: Any, new: Any, before: Any) -> jax.Array:
            mixed = weight * old + (1 - weight) * (new - before)
            kept = jnp.where(stepped.applied, mixed, old)
            return jnp.where(is_some, kept, 0.0)

        given = part, stepped.params, stepped.before
        return _by_leaf(mean, self.weights, *given)


def _by_leaf(
    fn: Callable[..., Any], values: Mapping[str, Any], *trees: Params
) -> Params:
    """Map ``fn(value, *leaves)`` with a value for the name of each leaf."""
    columns = zip(*map(jax.tree.leaves, trees), strict=True)
    pairs = zip(values.values(), columns, strict=True)
    made = [fn(value, *column) for value, column in pairs]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), made)
