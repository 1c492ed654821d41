"""1-bit Adam: Adam whose second moment is frozen, and whose momentum goes by signs.

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed". Differs: both moments' biases are corrected, that of the
second by the steps in which it changed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class OneBitAdam:
    """The optimizer; see `onebit_adam`."""

    learning_rate: float | Callable[[jax.Array], Any]
    freeze_step: int
    b1: float
    b2: float
    eps: float
    weight_decay: float

    def init(self, params: Params) -> OneBitAdamState:
        """See `MakesUpdate`."""
        zeros = optax.tree.zeros_like(params)
        return OneBitAdamState(jnp.int32(0), zeros, optax.tree.zeros_like(params))

    def make_update(self, spec: UpdateSpec) -> Update:
        """See `MakesUpdate`."""
        if num_batch_shards(spec.mesh) == 1:
            return OneBitAdamUpdate(self, PLAIN)
        given = self.freeze_step, self.b1, spec.clip_norm
        return OneBitAdamUpdate(self, OneBitMomentum(*given))


@dataclasses.dataclass(frozen=True)
class OneBitAdamUpdate(Update):
    """The update of 1-bit Adam, on the logical state.

    Attributes:
      own: the optimizer.
      reduction: gives it gradients, and later momenta.
    """

    own: OneBitAdam
    reduction: Reduction

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
        (params, state), own = before, self.own
        is_warm = state.count < own.freeze_step if self._compresses else True
        grads = jax.tree.map(lambda g: factor * g, grads)
        count = state.count + 1
        frozen = jnp.minimum(count, own.freeze_step) if self._compresses else count
        mu = jax.tree.map(
            lambda m, g: jnp.where(is_warm, own.b1 * m + (1 - own.b1) * g, g),
            state.mu,
            grads,
        )
        nu = jax.tree.map(
            lambda v, g: jnp.where(is_warm, own.b2 * v + (1 - own.b2) * g**2, v),
            state.nu,
            grads,
        )
        unbiased = 1 - own.b1 ** count.astype(jnp.float32)
        unbiased_nu = 1 - own.b2 ** frozen.astype(jnp.float32)

        def new(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            step = (m / unbiased) / (jnp.sqrt(v / unbiased_nu) + own.eps)
            return p - rate * (step + own.weight_decay * p)

        return jax.tree.map(new, params, mu, nu), OneBitAdamState(count, mu, nu)

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        if self._compresses:
            return ()
        return ("optimizer: there is one data shard, and nothing to compress: Adam.",)

    @property
    def _compresses(self) -> bool:
        return isinstance(self.reduction, OneBitMomentum)


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
