"""An optimizer that is given every data shard's gradients, and adds them up itself."""

import dataclasses
from typing import Any

import jax
import optax

from jaxpar.optim import LocalGradients, PlainReduction, Update


class Summed(LocalGradients):
    """The compiler makes of the sum what the plain reduction does."""

    def communicated(self, leaves: Any, wire: Any) -> Any:
        return PlainReduction().communicated(leaves, wire)


@dataclasses.dataclass(frozen=True)
class LocalSgd:
    """Plain SGD."""

    rate: float

    def init(self, params):
        return ()

    def make_update(self, spec):
        return LocalUpdate(self.rate, len(spec.leaf_shardings))


@dataclasses.dataclass(frozen=True)
class LocalUpdate(Update):
    rate: float
    num_leaves: int
    reduction = Summed()

    def apply(self, grads, params, opt_state, *, factor, applied, loss):
        assert len(jax.tree.leaves(grads)) == self.num_leaves
        new = jax.tree.map(
            lambda x, g: x - self.rate * factor * g.sum(0).reshape(x.shape),
            params,
            grads,
        )
        return optax.tree.where(applied, new, params), opt_state, {}
