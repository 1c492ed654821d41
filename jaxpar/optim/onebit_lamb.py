"""1-bit LAMB: LAMB whose momentum goes by signs, and whose trust ratios are frozen.

After the warm-up the second moment that divides the momentum is frozen, and so is each
leaf's trust ratio. A fresh second moment still follows the gradients that two momenta
imply; how far it is from the frozen one scales the ratio.

Source: Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch
Training with LAMB's Convergence Speed". Differs: momenta are not rescaled before they
are exchanged, which the paper does because its one scale serves all layers; here each
leaf has its own. All biases are corrected, as `optax.lamb` does: that of the frozen
moment and of the mean ratio by the warm-up's steps, that of the fresh moment by all
steps. Both moments are then equal at the freeze, and no step changes its size there.
The mean leaves out steps where a norm is 0, which have no ratio.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpar.optim.onebit_adam import OneBitRule, make_onebit_update
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneBitLambState:
    """The state; by its count alone, and not by data shards, parts are frozen.

    Attributes:
      count: steps taken.
      mu: by leaf, the mean of gradients.
      nu: by leaf, the mean of squared gradients, frozen after the warm-up.
      nu_fresh: the same, never frozen.
      coeff: by leaf, a scalar: the mean of the warm-up's trust ratios, biased to zero.
      last_factor: by leaf, a scalar: what scaled it in the last step.
    """

    count: Any
    mu: PyTree
    nu: PyTree
    nu_fresh: PyTree
    coeff: PyTree
    last_factor: PyTree


@dataclasses.dataclass(frozen=True)
class OneBitLamb(OneBitRule):
    """The optimizer; see `onebit_lamb`."""

    learning_rate: float | Callable[[jax.Array], Any]
    freeze_step: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    coeff_bounds: tuple[float, float]
    coeff_beta: float
    factor_bounds: tuple[float, float]
    factor_threshold: float
    plain: ClassVar[str] = "LAMB"

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if self.freeze_step < 1:
            raise ValueError(
                f"onebit_lamb: freeze_step={self.freeze_step} must be at least 1: "
                "second moments and trust ratios are those of the warm-up."
            )
        for name in ("b1", "b2", "coeff_beta"):
            if not 0 <= (decay := getattr(self, name)) < 1:
                raise ValueError(
                    f"onebit_lamb: {name}={decay} must be from 0 to below 1."
                )
        if not self.eps > 0:
            raise ValueError(
                f"onebit_lamb: eps={self.eps} must be above 0: it divides where there "
                "has been no gradient."
            )
        for name in ("coeff_bounds", "factor_bounds"):
            low, high = getattr(self, name)
            if not (0 <= low <= high and high > 0):
                raise ValueError(
                    f"onebit_lamb: {name}={(low, high)} must be two numbers from 0 up, "
                    "the smaller one first, and not both 0."
                )
        for name in ("weight_decay", "factor_threshold"):
            if not (number := getattr(self, name)) >= 0:
                raise ValueError(f"onebit_lamb: {name}={number} must be at least 0.")

    def init(self, params: Params) -> OneBitLambState:
        """See `MakesUpdate`."""
        mu, nu, fresh = (optax.tree.zeros_like(params) for _ in range(3))
        coeff = jax.tree.map(lambda _: jnp.float32(0), params)
        factor = jax.tree.map(lambda _: jnp.float32(1), params)
        return OneBitLambState(jnp.int32(0), mu, nu, fresh, coeff, factor)

    def make_update(self, spec: UpdateSpec) -> Update:
        """See `MakesUpdate`; a note names leaves of one element."""
        single = [x.name for x in spec.leaf_shardings if math.prod(x.shape) == 1]
        said = (
            f"optimizer: {', '.join(single[:3])} ({len(single)} in all) have one "
            "element: LAMB moves such a leaf by the learning rate times its own size "
            "in each step. If it must move freely, make it part of a larger parameter, "
            "or use onebit_adam.",
        )
        return make_onebit_update(self, spec, said if single else ())

    def step(
        self, before: PyTree, grads: PyTree, rate: jax.Array, compresses: bool
    ) -> PyTree:
        """See `OneBitRule`."""
        params, state = before
        is_warm = state.count < self.freeze_step
        is_plain = is_warm if compresses else True
        count = state.count + 1
        mu = jax.tree.map(
            lambda m, g: jnp.where(is_plain, self.b1 * m + (1 - self.b1) * g, g),
            state.mu,
            grads,
        )

        def fresher(v: jax.Array, g: jax.Array, m: jax.Array, old: jax.Array) -> Any:
            implied = (m - self.b1 * old) / (1 - self.b1)
            square = jnp.square(jnp.where(is_plain, g, implied))
            return self.b2 * v + (1 - self.b2) * square

        fresh = jax.tree.map(fresher, state.nu_fresh, grads, mu, state.mu)
        nu = jax.tree.map(lambda v, f: jnp.where(is_warm, f, v), state.nu, fresh)
        steps = count.astype(jnp.float32)
        frozen = jnp.minimum(steps, self.freeze_step)

        def new(p: Any, m: Any, v: Any, f: Any, coeff: Any, last: Any) -> tuple:
            root = jnp.sqrt(v / (1 - self.b2**frozen)) + self.eps
            real = jnp.sqrt(f / (1 - self.b2**steps)) + self.eps
            adam = m / (1 - self.b1**steps) / (root if compresses else real)
            step = adam + self.weight_decay * p
            ratio, is_ratio = self._trust_ratio(p, step)
            mean = self.coeff_beta * coeff + (1 - self.coeff_beta) * ratio
            coeff = jnp.where(is_warm & is_ratio, mean, coeff)
            factor = self._factor(jnp.max(root / real, initial=0.0), adam, step, last)
            factor = jnp.where(is_plain, last, factor)
            scaled = coeff / (1 - self.coeff_beta**frozen) * factor
            return p - rate * jnp.where(is_plain, ratio, scaled) * step, coeff, factor

        given = params, mu, nu, fresh, state.coeff, state.last_factor
        found = jax.tree.map(new, *given)
        outer, inner = jax.tree.structure(params), jax.tree.structure((0, 0, 0))
        params, coeff, factor = jax.tree.transpose(outer, inner, found)
        return params, OneBitLambState(count, mu, nu, fresh, coeff, factor)

    def _trust_ratio(self, p: jax.Array, step: jax.Array) -> tuple[Any, jax.Array]:
        """LAMB's, clamped; and whether it is one: where a norm is 0 it is only 1."""
        norm_p, norm_step = _norm(p), _norm(step)
        is_ratio = (norm_p > 0) & (norm_step > 0)
        ratio = norm_p / jnp.where(is_ratio, norm_step, 1.0)
        return jnp.where(is_ratio, jnp.clip(ratio, *self.coeff_bounds), 1.0), is_ratio

    def _factor(
        self, most: jax.Array, adam: jax.Array, step: jax.Array, last: jax.Array
    ) -> jax.Array:
        """What scales a frozen trust ratio, which is for the whole step.

        Args:
          most: how much longer the step could be by the fresh moment, at most.
          adam: the step without weight decay, which no moment divides.
          step: the step.
          last: the last factor. Staying near it goes before `factor_bounds`.
        """
        whole = _norm(step)
        share = jnp.where(whole > 0, _norm(adam) / jnp.where(whole > 0, whole, 1), 1)
        share = jnp.minimum(share, 1.0)
        factor = jnp.clip(most * share + 1 - share, *self.factor_bounds)
        change = self.factor_threshold
        return jnp.clip(factor, last * (1 - change), last * (1 + change))


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x)))


def onebit_lamb(
    learning_rate: float | Callable[[jax.Array], Any],
    freeze_step: int,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    coeff_bounds: tuple[float, float] = (0.01, 10.0),
    coeff_beta: float = 0.9,
    factor_bounds: tuple[float, float] = (0.5, 4.0),
    factor_threshold: float = 0.1,
) -> OneBitLamb:
    """LAMB that sends 1 bit an element of its momentum, after a warm-up.

    For ZeRO 0, 1 and 2. A leaf has one trust ratio, and so have layers that are stacked
    in it, as with `optax.lamb`. Norm and clip_norm are as of `onebit_adam`.

    Args:
      learning_rate: a number, or a schedule of the step.
      freeze_step: steps of the warm-up, in which it is LAMB: 15 to 20 % of the run.
      b1: decay of the momentum.
      b2: decay of the second moments.
      eps: added to their roots.
      weight_decay: of all parameters, added to the step before its norm is taken.
      coeff_bounds: least and largest trust ratio; (0, inf) is `optax.lamb`.
      coeff_beta: decay of the mean of trust ratios; 1 / (1 - coeff_beta) should be at
        most freeze_step.
      factor_bounds: least and largest factor of a frozen trust ratio.
      factor_threshold: the fraction by which a factor may change in a step.

    Raises:
      ValueError: if a number is out of range.

    Source: Li et al. 2021, "1-bit LAMB".

    Example:
      >>> onebit_lamb(1e-3, freeze_step=100).factor_bounds
      (0.5, 4.0)
    """
    return OneBitLamb(
        learning_rate,
        freeze_step,
        b1,
        b2,
        eps,
        weight_decay,
        coeff_bounds,
        coeff_beta,
        factor_bounds,
        factor_threshold,
    )
