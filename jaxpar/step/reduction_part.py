"""What a reduction carries, as a part of the train state: one for each data shard."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import entry_of
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.carried import Carried, Stepped
from jaxpar.step.reduction import Reduction
from jaxpar.types import Params, PyTree

PART = "reduction"
"""The name in ``state.carried`` of what a reduction carries."""


@dataclasses.dataclass(frozen=True)
class ReductionPart(Carried):
    """What a reduction carries, as a part of the state.

    Attributes:
      reduction: the reduction.
      leaves: the trained leaves as a data shard sees them.
      saved: as the reduction says.
    """

    reduction: Reduction
    leaves: tuple[LeafSharding, ...]
    saved: bool
    name: str = PART
    per_shard: bool = True
    in_gradients: bool = True

    def init(self, params: Params) -> PyTree:
        """See `Reduction.init`."""
        del params
        return self.reduction.init(self.leaves)

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        """That of the leaf's view whose name and shape the array has."""
        for leaf in self.leaves:
            if not f"/{name}".endswith(f"/{leaf.name}"):
                continue
            if shape in (leaf.view_shape, leaf.shard_view_shape):
                return leaf.view_spec(data=False)
            if shape and shape[0] == leaf.ways_placed:
                return P(entry_of([axis for axes in leaf.placed for axis in axes]))
        return P()

    def begin(self, params: Params, opt_state: PyTree) -> PyTree:
        """See `Reduction.begin`."""
        del params
        return self.reduction.begin(self.leaves, opt_state)

    def at_new_params(self, part: PyTree) -> PyTree:
        """See `Reduction.at_new_params`."""
        return self.reduction.at_new_params(part)

    def after(self, part: PyTree, stepped: Stepped) -> PyTree:
        """What the step's reduction carried, if the step was applied."""
        return optax.tree.where(stepped.applied, stepped.carry[self.name], part)


def reduction_parts(
    reduction: Reduction, leaves: Sequence[LeafSharding]
) -> tuple[ReductionPart, ...]:
    """What a reduction carries, as parts of the state: one, or none if it is empty."""
    part = ReductionPart(reduction, tuple(leaves), reduction.saved)
    carried = jax.eval_shape(lambda: reduction.init(leaves))
    return (part,) if jax.tree.leaves(carried) else ()


def of_own_part(body: Callable[..., tuple]) -> Callable[..., tuple]:
    """Give a function on a data shard its own part of what is carried, and take it.

    It is the last argument and the last result; dim 0, the data shards, is left out.
    """

    def run(*given: Any) -> tuple:
        *others, carry = given
        *found, carry = body(*others, jax.tree.map(lambda x: x[0], carry))
        return *found, jax.tree.map(lambda x: x[None], carry)

    return run
