"""How does an optimizer that exists get another reduction of its gradients?"""

import dataclasses

import optax

from jaxpar.optim.fused_update import FusedOptimizer
from jaxpar.optim.make_update import make_update
from jaxpar.step.reduction import LocalGradients as LocalGradients
from jaxpar.step.reduction import PlainReduction as PlainReduction
from jaxpar.step.reduction import Reduction
from jaxpar.step.reduction import Wire as Wire  # Public, in jaxpar.optim.
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class WithReduction:
    """An optimizer whose gradients are reduced over data by a reduction of one's own.

    Attributes:
      optimizer: an optax transformation, or a fused optimizer.
      reduction: the reduction.

    Raises:
      TypeError: if the optimizer makes its own update: give that update a `reduction`.

    Example:
      >>> optimizer = WithReduction(optax.adamw(1e-3), PlainReduction())
      >>> sorted(optimizer.init({"w": 1.0})[0]._fields)
      ['count', 'mu', 'nu']
    """

    optimizer: optax.GradientTransformation | FusedOptimizer
    reduction: Reduction

    def __post_init__(self):
        known = optax.GradientTransformation, FusedOptimizer
        if not isinstance(self.optimizer, known):
            raise TypeError(
                f"optimizer={self.optimizer!r} must be an optax transformation or a "
                "fused optimizer of jaxpar.optim; an optimizer that makes its own "
                "update brings a reduction as that update's attribute `reduction`."
            )

    def init(self, params: Params) -> PyTree:
        """The optimizer's state."""
        return self.optimizer.init(params)

    def make_update(self, spec: UpdateSpec) -> Update:
        """The optimizer's update, with the reduction."""
        update = make_update(self.optimizer, spec)
        assert dataclasses.is_dataclass(update), "of optax, or fused"
        return dataclasses.replace(update, reduction=self.reduction)
