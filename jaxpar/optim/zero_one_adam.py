"""0/1 Adam: less and less is exchanged, by signs, and in many steps nothing.

Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training
via 0/1 Adam". Differs: both moments' biases are corrected, that of the second by the
steps in which it changed; weight decay, decoupled, is of the parameters that all have
in common, at each exchange by the sum of the rates since the last one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.mesh import num_batch_shards
from jaxpar.optim.applied import updated_if
from jaxpar.optim.zero_one_reduction import (
    SIGNS,
    WHOLE,
    AdamNumbers,
    Rounds,
    ZeroOneReduction,
)
from jaxpar.step.reduction import PLAIN, Reduction
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import Metrics, Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroOneAdamState:
    """The state.

    Attributes:
      counts: steps of whole gradients, of signs, and of no exchange.
      rates: the sum of learning rates since workers last exchanged, while they step by
        themselves.
      mu: the momentum.
      nu: the second moment.
    """

    counts: Any
    rates: Any
    mu: PyTree
    nu: PyTree


@dataclasses.dataclass(frozen=True)
class ZeroOneAdam:
    """The optimizer; see `zero_one_adam`."""

    own: AdamNumbers
    rounds: Rounds
    weight_decay: float

    def init(self, params: Params) -> ZeroOneAdamState:
        """See `MakesUpdate`."""
        zeros = optax.tree.zeros_like(params)
        numbers = jnp.zeros(3, jnp.int32), jnp.float32(0)
        return ZeroOneAdamState(*numbers, zeros, optax.tree.zeros_like(params))

    def make_update(self, spec: UpdateSpec) -> Update:
        """See `MakesUpdate`."""
        if num_batch_shards(spec.mesh) == 1:
            return ZeroOneAdamUpdate(self, PLAIN)
        given = self.rounds, self.own, spec.clip_norm
        return ZeroOneAdamUpdate(self, ZeroOneReduction(*given))


@dataclasses.dataclass(frozen=True)
class ZeroOneAdamUpdate(Update):
    """The update of 0/1 Adam, on the logical state.

    Attributes:
      optimizer: the optimizer.
      reduction: gives it gradients, and later what all moved by.
    """

    optimizer: ZeroOneAdam
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
        before = params, opt_state
        given = before, optax.tree.scale(factor, optax.tree.cast(grads, jnp.float32))
        params, opt_state = updated_if(applied, self._stepped, *given)
        rate = self.optimizer.own.rate(before[1].counts)
        names = ("rounds_whole", "rounds_signs", "rounds_alone")
        rounds = dict(zip(names, opt_state.counts, strict=True))
        return params, opt_state, {"learning_rate": rate, **rounds}

    def _stepped(self, before: PyTree, grads: PyTree) -> PyTree:
        (params, state), own = before, self.optimizer.own
        kind, alone = self._round(state.counts)
        new, meets = state.counts + (jnp.arange(3) == kind), kind == SIGNS
        rate, unbiased = own.rate(state.counts), own.unbiased(new)
        rates, decay = state.rates + rate, self.optimizer.weight_decay

        def momentum(m: jax.Array, g: jax.Array) -> jax.Array:
            together = jnp.where(meets, unbiased * g / rates, m)
            return jnp.where(alone, together, own.b1 * m + (1 - own.b1) * g)

        def variance(v: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.where(kind == WHOLE, own.b2 * v + (1 - own.b2) * g**2, v)

        def moved(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            root = own.root(v, new)
            together = g / root + jnp.where(meets, rates, 0.0) * decay * p
            learning = rate * (m / unbiased / root + decay * p)
            return p - jnp.where(alone, together, learning)

        mu = jax.tree.map(momentum, state.mu, grads)
        nu = jax.tree.map(variance, state.nu, grads)
        params = jax.tree.map(moved, params, mu, nu, grads)
        rates = jnp.where(alone & ~meets, rates, 0.0)
        return params, ZeroOneAdamState(new, rates, mu, nu)

    def _round(self, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a step exchanges, and whether workers step by themselves."""
        if not isinstance(self.reduction, ZeroOneReduction):
            return jnp.int32(WHOLE), jnp.bool_(False)
        rounds = self.optimizer.rounds
        return rounds.kind(counts), rounds.is_alone(counts)

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        if isinstance(self.reduction, ZeroOneReduction):
            return ()
        return ("optimizer: there is one data shard, and nothing to compress: Adam.",)


def zero_one_adam(
    learning_rate: float | Callable[[jax.Array], Any],
    var_freeze_step: int,
    *,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32678,
    local_step_clipper: int = 16,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> ZeroOneAdam:
    """Adam that soon exchanges signs in most steps, and later nothing in many.

    For ZeRO 0, 1 and 2. The norm, which clip_norm bounds, is that of the gradient where
    whole gradients are exchanged, and else the root mean square of those of the
    workers' own gradients. A loss is that of each worker's own parameters; evaluation
    and checkpoints have those of the last exchange.

    Args:
      learning_rate: a number, or a schedule of the step.
      var_freeze_step: steps in which the second moment changes: 15 to 20 % of the run.
      var_update_scaler: whole gradients that are exchanged, and change the second
        moment, at each interval; it begins at 1 and doubles. Signs go in between.
      local_step_scaler: steps at each interval after that, in which workers step by
        themselves; it begins at 1 and doubles.
      local_step_clipper: the longest of these intervals, a power of two.
      b1: decay of the momentum.
      b2: decay of the second moment.
      eps: added to its root.
      weight_decay: of all parameters, decoupled.

    Raises:
      ValueError: if a number is out of range.

    Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale
    Training via 0/1 Adam"; the defaults are those of DeepSpeed.

    Example:
      >>> zero_one_adam(1e-3, 100).rounds.local_step_clipper
      16
    """
    rounds = Rounds(
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper
    )
    for field in dataclasses.fields(rounds):
        if (number := getattr(rounds, field.name)) < 1:
            raise ValueError(
                f"zero_one_adam: {field.name}={number} must be at least 1."
            )
    if local_step_clipper & (local_step_clipper - 1):
        raise ValueError(
            f"zero_one_adam: local_step_clipper={local_step_clipper} must be a power "
            "of two, as intervals double; use 8, 16 or 32."
        )
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= decay < 1:
            raise ValueError(
                f"zero_one_adam: {name}={decay} must be from 0 to below 1."
            )
    return ZeroOneAdam(AdamNumbers(learning_rate, b1, b2, eps), rounds, weight_decay)
