"""1-bit Adam: Adam whose second moment is frozen, and whose momentum goes by signs.

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed". Differs: both moments' biases are corrected, that of the
second by the steps in which it changed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from jaxpar.mesh import num_batch_shards
from jaxpar.optim.applied import updated_if
from jaxpar.optim.onebit_reduction import OneBitMomentum
from jaxpar.step.reduction import PLAIN, Reduction
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import Metrics, Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneBitAdamState:
    """The state: steps, and both moments, as of optax.adam."""

    count: Any
    mu: PyTree
    nu: PyTree


@runtime_checkable
class OneBitRule(Protocol):
    """An optimizer that `OneBitUpdate` runs.

    Attributes:
      learning_rate: a number, or a schedule of the step.
      freeze_step: steps of the warm-up.
      b1: decay of the momentum.
      plain: the name of what it is without compression.
    """

    learning_rate: float | Callable[[jax.Array], Any]
    freeze_step: int
    b1: float
    plain: ClassVar[str]

    def step(
        self, before: PyTree, grads: PyTree, rate: jax.Array, compresses: bool
    ) -> PyTree:
        """Take a step.

        Args:
          before: parameters and state, whose `count` is of the steps taken.
          grads: the mean gradients, fp32; the next momenta after the warm-up if it
            compresses.
          rate: the learning rate.
          compresses: whether momenta are exchanged after the warm-up.

        Returns:
          Parameters and state.
        """
        ...


def make_onebit_update(
    own: OneBitRule, spec: UpdateSpec, notes: tuple[str, ...] = ()
) -> "OneBitUpdate":
    """Make the update of a rule; one data shard has nothing to compress.

    Args:
      own: the rule.
      spec: as of `MakesUpdate`.
      notes: what else there is to say.
    """
    if num_batch_shards(spec.mesh) > 1:
        given = own.freeze_step, own.b1, spec.clip_norm
        return OneBitUpdate(own, OneBitMomentum(*given), notes)
    said = f"optimizer: there is one data shard, and nothing to compress: {own.plain}."
    return OneBitUpdate(own, PLAIN, (said, *notes))


@dataclasses.dataclass(frozen=True)
class OneBitUpdate(Update):
    """The update of an optimizer in one bit, on the logical state.

    Attributes:
      own: the optimizer.
      reduction: gives it gradients, and later momenta.
      said: its notes.
    """

    own: OneBitRule
    reduction: Reduction
    said: tuple[str, ...] = ()

    def apply(
        self,
        grads: PyTree,
        params: PyTree,
        opt_state: PyTree,
        *,
        factor: jax.Array,
        applied: jax.Array,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree, Metrics]:
        """See `Update`."""
        del loss
        before, grads = (params, opt_state), optax.tree.cast(grads, jnp.float32)
        rate = self._rate(opt_state.count)
        given = before, grads, factor, rate
        params, opt_state = updated_if(applied, self._stepped, *given)
        return params, opt_state, {"learning_rate": rate}

    def _rate(self, count: jax.Array) -> jax.Array:
        rate = self.own.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)

    def _stepped(
        self, before: PyTree, grads: PyTree, factor: jax.Array, rate: jax.Array
    ) -> PyTree:
        grads = jax.tree.map(lambda g: factor * g, grads)
        compresses = isinstance(self.reduction, OneBitMomentum)
        return self.own.step(before, grads, rate, compresses)

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        return self.said


@dataclasses.dataclass(frozen=True)
class OneBitAdam(OneBitRule):
    """The optimizer; see `onebit_adam`."""

    learning_rate: float | Callable[[jax.Array], Any]
    freeze_step: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    plain: ClassVar[str] = "Adam"

    def init(self, params: Params) -> OneBitAdamState:
        """See `MakesUpdate`."""
        zeros = optax.tree.zeros_like(params)
        return OneBitAdamState(jnp.int32(0), zeros, optax.tree.zeros_like(params))

    def make_update(self, spec: UpdateSpec) -> Update:
        """See `MakesUpdate`."""
        return make_onebit_update(self, spec)

    def step(
        self, before: PyTree, grads: PyTree, rate: jax.Array, compresses: bool
    ) -> PyTree:
        """See `OneBitRule`."""
        params, state = before
        is_warm = state.count < self.freeze_step if compresses else True
        count = state.count + 1
        frozen = jnp.minimum(count, self.freeze_step) if compresses else count
        mu = jax.tree.map(
            lambda m, g: jnp.where(is_warm, self.b1 * m + (1 - self.b1) * g, g),
            state.mu,
            grads,
        )
        nu = jax.tree.map(
            lambda v, g: jnp.where(is_warm, self.b2 * v + (1 - self.b2) * g**2, v),
            state.nu,
            grads,
        )
        unbiased = 1 - self.b1 ** count.astype(jnp.float32)
        unbiased_nu = 1 - self.b2 ** frozen.astype(jnp.float32)

        def new(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            step = (m / unbiased) / (jnp.sqrt(v / unbiased_nu) + self.eps)
            return p - rate * (step + self.weight_decay * p)

        return jax.tree.map(new, params, mu, nu), OneBitAdamState(count, mu, nu)


def onebit_adam(
    learning_rate: float | Callable[[jax.Array], Any],
    freeze_step: int,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> OneBitAdam:
    """Adam that sends 1 bit an element of its momentum, after a warm-up.

    For ZeRO 0, 1 and 2. The norm, which clip_norm bounds, is that of the gradient, and
    after the warm-up the root mean square of those of the workers' own gradients: one
    scalar is reduced.

    Args:
      learning_rate: a number, or a schedule of the step.
      freeze_step: steps of the warm-up, in which it is Adam: 15 to 20 % of the run.
      b1: decay of the momentum.
      b2: decay of the second moment, which is frozen after the warm-up.
      eps: added to its root.
      weight_decay: of all parameters, decoupled.

    Raises:
      ValueError: if a number is out of range.

    Source: Tang et al. 2021, "1-bit Adam".

    Example:
      >>> onebit_adam(1e-3, freeze_step=100).b1
      0.9
    """
    if freeze_step < 1:
        raise ValueError(
            f"onebit_adam: freeze_step={freeze_step} must be at least 1: the second "
            "moment is that of the warm-up."
        )
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= decay < 1:
            raise ValueError(f"onebit_adam: {name}={decay} must be from 0 to below 1.")
    return OneBitAdam(learning_rate, freeze_step, b1, b2, eps, weight_decay)
