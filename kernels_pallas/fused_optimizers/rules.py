"""What does an optimizer compute per element: its moments, and its direction."""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

Moments = dict[str, jax.Array]
"""Moments by name, in fp32."""


@runtime_checkable
class Arithmetic(Protocol):
    """Roots and quotients; the default is jax's, a kernel's may be approximate."""

    def sqrt(self, x: jax.Array) -> jax.Array:
        """Compute the root of a number that is not negative."""
        return jnp.sqrt(x)

    def divide(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Compute a quotient."""
        return x / y


class Exact(Arithmetic):
    """Roots and quotients as jax rounds them."""


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; with trust ratios, LAMB.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; You et
    al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.

    Attributes:
      b1: of the first moment.
      b2: of the second.
      eps: added to the root; positive.
      eps_root: added below it.
      trust_ratio: whether steps are scaled leaf by leaf.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0
    trust_ratio: bool = False
    moments: ClassVar[tuple[str, ...]] = ("mu", "nu")
    num_corrections: ClassVar[int] = 2

    def __post_init__(self):
        _check_rates(self.b1, self.b2)
        if not self.eps > 0 or not self.eps_root >= 0:
            raise ValueError(
                f"eps={self.eps} must be positive, and eps_root={self.eps_root} not "
                "negative: buckets are padded with zeros, which are divided by them."
            )

    def corrections(self, count: jax.Array) -> tuple[jax.Array, ...]:
        """Bias corrections: factors on the first moment and the second's root."""
        return 1 / (1 - self.b1**count), 1 / jnp.sqrt(1 - self.b2**count)

    def advance(self, grads: jax.Array, moments: Moments) -> Moments:
        """Update the moments with the gradient and its square."""
        mu = (1 - self.b1) * grads + self.b1 * moments["mu"]
        nu = (1 - self.b2) * (grads * grads) + self.b2 * moments["nu"]
        return {"mu": mu, "nu": nu}

    def direction(
        self,
        grads: Any,
        before: Moments,
        after: Moments,
        corrections: list,
        arithmetic: Arithmetic,
    ) -> jax.Array:
        """The first moment over the root of the second."""
        del grads, before
        # The root that 8-bit codes are made of, so that a kernel takes only one.
        root = arithmetic.sqrt(after["nu"]) * corrections[1]
        if self.eps_root:
            root = arithmetic.sqrt(root * root + self.eps_root)
        return arithmetic.divide(after["mu"] * corrections[0], root + self.eps)


@dataclasses.dataclass(frozen=True)
class Lion:
    """The sign of a mean of gradients.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms",
    algorithm 2.

    Attributes:
      b1: of the interpolation whose sign is taken.
      b2: of the mean that is stored.
    """

    b1: float = 0.9
    b2: float = 0.99
    moments: ClassVar[tuple[str, ...]] = ("mu",)
    num_corrections: ClassVar[int] = 0
    trust_ratio: ClassVar[bool] = False

    def __post_init__(self):
        _check_rates(self.b1, self.b2)

    def corrections(self, count: jax.Array) -> tuple[jax.Array, ...]:
        """None."""
        del count
        return ()

    def advance(self, grads: jax.Array, moments: Moments) -> Moments:
        """Update the mean with the gradient."""
        return {"mu": (1 - self.b2) * grads + self.b2 * moments["mu"]}

    def direction(
        self,
        grads: Any,
        before: Moments,
        after: Moments,
        corrections: list,
        arithmetic: Arithmetic,
    ) -> jax.Array:
        """The sign of the interpolation with the previous mean."""
        del after, corrections, arithmetic
        return jnp.sign((1 - self.b1) * grads + self.b1 * before["mu"])


Rule = AdamW | Lion
"""An optimizer, element by element.

`moments` names its moments ("nu" has no sign), `trust_ratio` says whether each leaf's
step is scaled by its norm over that of its direction.
"""


def _check_rates(b1: float, b2: float) -> None:
    for name, rate in (("b1", b1), ("b2", b2)):
        if not 0 <= rate < 1:
            raise ValueError(
                f"{name}={rate} must be at least 0 and below 1: it is the part of a "
                "moment that remains after a step."
            )
