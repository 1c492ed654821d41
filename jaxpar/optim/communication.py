"""Which flags does a recipe have for what data shards and replicas send each other?"""

import dataclasses

import optax

from jaxpar.mesh import MeshShape
from jaxpar.optim.diloco import DiLoCo, diloco
from jaxpar.optim.quantized_sums import ZeroPlusPlus
from jaxpar.step.update import MakesUpdate

OUTER_STEP = 0.7, 0.9
"""The usual rate and momentum of DiLoCo's outer step."""


@dataclasses.dataclass(frozen=True)
class CommunicationConfig:
    """Fields for a recipe's config to inherit."""

    zero: int = 3
    """ZeRO stage: 0, 1, 2 or 3."""
    weight_bits: int | None = None
    """ZeRO++: bits of a parameter while it is gathered, 8 or 4."""
    gradient_bits: int | None = None
    """ZeRO++: bits of a gradient while it is reduced, 8 or 4."""
    inside_bits: int | None = None
    """ZeRO++: likewise, inside a replica, if these are others."""
    secondary: bool = False
    """ZeRO++: replicas split the state too; parameters go between them once a step."""
    join_every: int = 0
    """DiLoCo: replicas train by themselves, and are joined every so many steps."""
    join_rate: float = OUTER_STEP[0]
    """DiLoCo: of the outer step; 1 with momentum 0 averages parameters (local SGD)."""
    join_momentum: float = OUTER_STEP[1]
    """DiLoCo: of the outer step, Nesterov's."""

    def zero_stage(self) -> int | ZeroPlusPlus:
        """The stage, for `jaxpar.initialize`.

        Example:
          >>> CommunicationConfig(zero=2).zero_stage()
          2
          >>> CommunicationConfig(zero=2, weight_bits=8).zero_stage().stage
          2
        """
        bits = self.weight_bits, self.gradient_bits
        if not (any(bits) or self.inside_bits or self.secondary):
            return self.zero
        return ZeroPlusPlus(self.zero, *bits, self.inside_bits, self.secondary)

    def joined(
        self, optimizer: optax.GradientTransformation | MakesUpdate, mesh: MeshShape
    ) -> optax.GradientTransformation | MakesUpdate | DiLoCo:
        """The optimizer, inside of DiLoCo if that is asked for.

        Raises:
          ValueError: if the mesh has one replica, the optimizer is not of optax, or the
            outer step's numbers are given without `join_every`.
        """
        rate, momentum = self.join_rate, self.join_momentum
        if not self.join_every:
            if (rate, momentum) != OUTER_STEP:
                raise ValueError(
                    f"join_rate={rate}, join_momentum={momentum}: nothing is joined "
                    f"with join_every={self.join_every}; use --join-every 16 with them."
                )
            return optimizer
        if mesh.replica < 2:
            raise ValueError(
                f"join_every={self.join_every} joins replicas, and the mesh has one; "
                "use --mesh.replica 2."
            )
        if not isinstance(optimizer, optax.GradientTransformation):
            raise ValueError(
                f"join_every={self.join_every} needs an inner optimizer of optax, such "
                "as --optimizer adamw with its 32 bits."
            )
        step = optax.sgd(rate, momentum=momentum or None, nesterov=momentum > 0)
        given = {"replicas": mesh.replica, "every": self.join_every}
        return diloco(optimizer, **given, outer=step)
