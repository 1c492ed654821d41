"""How do workers exchange less and less often, and by signs, in 0/1 Adam?

While the second moment changes, a step exchanges whole gradients at growing intervals,
and between them the gradients' signs. Then each worker steps by itself: its parameters
are the ones that all have in common, less what it has moved by; at growing intervals
the signs of that are exchanged, and all begin from one place again.

Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training
via 0/1 Adam", algorithm 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar import tree
from jaxpar.jaxprs.branches import expected
from jaxpar.optim.workers import (
    SignReduction,
    exchanged_signs,
    own_gradients,
    own_shard,
    whole_sum,
    workers_of,
    zero_errors,
)
from jaxpar.sharding.collectives import Collectives, as_computed
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import clip_factor
from jaxpar.types import PyTree

Leaves = Sequence[LeafSharding]
Arrays = list[jax.Array]

WHOLE, SIGNS, ALONE = range(3)
"""What a step exchanges: gradients, signs, nothing."""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """When is what exchanged?

    Attributes:
      var_freeze_step: steps in which the second moment changes.
      var_update_scaler: whole gradients that are exchanged at each interval, which then
        doubles; it begins at 1.
      local_step_scaler: steps of each interval after that, which then doubles too.
      local_step_clipper: the longest of those: a power of two.
    """

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def is_alone(self, counts: jax.Array) -> jax.Array:
        """Whether workers step by themselves, after steps of each kind, ``[3]``."""
        return counts.sum() >= self.var_freeze_step

    def kind(self, counts: jax.Array) -> jax.Array:
        """What the next step exchanges, after steps of each kind, ``[3]``."""
        count = counts.sum()
        interval = jnp.left_shift(1, counts[WHOLE] // self.var_update_scaler)
        learns = jnp.where(count % interval == 0, WHOLE, SIGNS)
        since = count - self.var_freeze_step
        most = self.local_step_clipper.bit_length() - 1
        doubled = jnp.clip(since // self.local_step_scaler, 0, most)
        meets = (since + 1) % jnp.left_shift(1, doubled) == 0
        alone = jnp.where(meets, SIGNS, ALONE)
        return jnp.where(self.is_alone(counts), alone, learns)

    def after(self, counts: jax.Array) -> jax.Array:
        """The steps of each kind after the next one."""
        return counts + (jnp.arange(3) == self.kind(counts))


@dataclasses.dataclass(frozen=True)
class AdamNumbers:
    """The numbers of Adam that the optimizer and its reduction share.

    Attributes:
      learning_rate: of each step.
      b1: decay of the momentum.
      b2: decay of the second moment.
      eps: added to its root.
    """

    learning_rate: float | Callable[[jax.Array], Any]
    b1: float
    b2: float
    eps: float

    def rate(self, counts: jax.Array) -> jax.Array:
        """Of the next step, after steps of each kind."""
        rate = self.learning_rate
        given = rate(counts.sum()) if callable(rate) else rate
        return jnp.asarray(given, jnp.float32)

    def unbiased(self, counts: jax.Array) -> jax.Array:
        """What a momentum after these steps is divided by."""
        return 1 - self.b1 ** counts.sum().astype(jnp.float32)

    def root(self, variance: jax.Array, counts: jax.Array) -> jax.Array:
        """What a momentum is divided by, element by element, after these steps."""
        updates = jnp.maximum(counts[WHOLE], 1).astype(jnp.float32)
        return jnp.sqrt(variance / (1 - self.b2**updates)) + self.eps


@dataclasses.dataclass(frozen=True)
class ZeroOneReduction(SignReduction):
    """Gradients while the second moment changes; then what workers have moved by.

    Attributes:
      rounds: when what is exchanged.
      own: the optimizer's numbers.
      clip_norm: as of `OneBitMomentum`, the warm-up being steps of whole gradients.
    """

    rounds: Rounds
    own: AdamNumbers
    clip_norm: float | None = None

    def warm_up(self) -> int:
        """See `Reduction`."""
        return self.rounds.var_freeze_step

    def init(self, leaves: Leaves) -> PyTree:
        """Whole on each worker: both moments, its error, and what it has moved by.

        Args:
          leaves: as of `Reduction.init`.
        """
        errors = zero_errors(leaves)
        whole = ("momentum", "variance", "moved")
        return {
            "counts": jnp.zeros(3, jnp.int32),
            "rates": jnp.float32(0),
            "norm": jnp.float32(0),
            **{name: errors["worker"] for name in whole},
            **errors,
        }

    def begin(self, leaves: Leaves, opt_state: PyTree) -> PyTree:
        """See `Reduction`: where all began last, with the optimizer's moments.

        Args:
          leaves: as for `init`.
          opt_state: that of `jaxpar.optim.zero_one_adam`.
        """
        known = tree.named_leaves(opt_state)

        def moment(name: str) -> dict[str, jax.Array]:
            own = ((leaf, known[f"{name}/{leaf.name}"]) for leaf in leaves)
            return {leaf.name: x.reshape(leaf.view_shape) for leaf, x in own}

        numbers = {name: known[name] for name in ("counts", "rates")}
        moments = {"momentum": moment("mu"), "variance": moment("nu")}
        return {**self.init(leaves), **numbers, **moments}

    def at_new_params(self, carry: PyTree) -> PyTree:
        """See `Reduction`: all workers go on from there."""
        return {**carry, "moved": tree.zeros(carry["moved"])}

    def local(self, leaves: Leaves, params: Arrays, carry: PyTree) -> Arrays:
        """See `Reduction`: where this worker is."""
        return [
            (x - as_computed(leaf, carry["moved"][leaf.name])).astype(x.dtype)
            for leaf, x in zip(leaves, params, strict=True)
        ]

    def reduce(
        self,
        leaves: Leaves,
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[Arrays, PyTree]:
        """See `Reduction`.

        Returns:
          Gradients; later, the roots of the second moments times what the workers have
          moved by; zeros where nothing is exchanged.
        """
        names, counts = [leaf.name for leaf in leaves], carry["counts"]
        momentum, variance, moved, *errors = (
            [carry[part][name] for name in names]
            for part in ("momentum", "variance", "moved", "worker", "server")
        )
        raw, own_norm = own_gradients(leaves, grads, collectives)
        factor = clip_factor(own_norm, self.clip_norm)
        local = [factor * x for x in raw]
        kind, new_counts = self.rounds.kind(counts), self.rounds.after(counts)
        is_alone, rate = self.rounds.is_alone(counts), self.own.rate(counts)
        unbiased = self.own.unbiased(new_counts)

        masks = [v != 0 for v in variance]  # One bit has no zero.
        alone = list(map(self._momentum, momentum, local))
        roots = [self.own.root(v, counts) for v in variance]
        moved = [
            jnp.where(mask & is_alone, x + rate * m / unbiased / root, 0.0)
            for x, m, root, mask in zip(moved, alone, roots, masks, strict=True)
        ]
        triples = zip(moved, roots, local, strict=True)
        given = [jnp.where(is_alone, x * root, g) for x, root, g in triples]
        # Those of gradients end where workers begin to step by themselves.
        begins = counts.sum() == self.rounds.var_freeze_step
        kept = [jnp.where(begins, 0.0, x) for own in errors for x in own]
        exchange = functools.partial(self._exchanged, leaves, collectives)
        found, norm, kept = exchange(kind, (raw, own_norm), (given, masks), kept)
        meets = is_alone & (kind == SIGNS)
        rates = jnp.where(is_alone, carry["rates"] + rate, 0.0)

        def momentum_after(m: jax.Array, own: jax.Array, g: jax.Array) -> jax.Array:
            learned = jnp.where(is_alone, own, self._momentum(m, g))
            return jnp.where(meets, unbiased * g / rates, learned)

        def variance_after(v: jax.Array, g: jax.Array) -> jax.Array:
            learned = self.own.b2 * v + (1 - self.own.b2) * g**2
            return jnp.where(kind == WHOLE, learned, v)

        def by_leaf(arrays: Iterable[jax.Array]) -> dict[str, jax.Array]:
            return dict(zip(names, arrays, strict=True))

        return list(map(own_shard, leaves, found)), {
            "counts": new_counts,
            "rates": jnp.where(meets, 0.0, rates),
            "norm": jnp.where(jnp.isfinite(own_norm), norm, jnp.nan),
            "momentum": by_leaf(map(momentum_after, momentum, alone, found)),
            "variance": by_leaf(map(variance_after, variance, found)),
            "moved": by_leaf(jnp.where(meets, 0.0, x) for x in moved),
            "worker": by_leaf(kept[: len(names)]),
            "server": by_leaf(kept[len(names) :]),
        }

    def _momentum(self, momentum: jax.Array, grad: jax.Array) -> jax.Array:
        return self.own.b1 * momentum + (1 - self.own.b1) * grad

    def _exchanged(
        self,
        leaves: Leaves,
        collectives: Collectives,
        kind: jax.Array,
        gradients: tuple[Arrays, jax.Array],
        signed: tuple[Arrays, Arrays],
        errors: Arrays,
    ) -> tuple[Arrays, jax.Array, Arrays]:
        """What all have in common after a step of a kind, its norm, and errors.

        Args:
          leaves: as of `reduce`.
          collectives: as of `reduce`.
          kind: of the step.
          gradients: whole ones of this worker, and the mean norm.
          signed: what signs are sent of, and masks.
          errors: of workers and servers, those of before.
        """
        raw, own_norm = gradients

        def whole(*errors: jax.Array) -> tuple:
            shares = [x / workers_of(leaves) for x in raw]
            pairs = zip(leaves, shares, strict=True)
            sums = [whole_sum(*pair, collectives) for pair in pairs]
            norm = optax.tree.norm(sums)
            factor = clip_factor(norm, self.clip_norm)
            return [factor * x for x in sums], norm, list(errors)

        def signs(*errors: jax.Array) -> tuple:
            found, new = exchanged_signs(leaves, *signed, errors)
            return found, own_norm, new

        def nothing(*errors: jax.Array) -> tuple:
            return [jnp.zeros_like(x) for x in raw], own_norm, list(errors)

        # What is planned and explained is a step in which signs are exchanged.
        with expected(0.0, 1.0, 0.0):
            return jax.lax.switch(kind, [whole, signs, nothing], *errors)

    def notes(self) -> tuple[str, ...]:
        """See `Reduction`."""
        own = self.rounds
        return (
            f"data: for {own.var_freeze_step} steps gradients are exchanged, whole at "
            "growing intervals, else by their signs; then each worker steps by itself, "
            f"up to {own.local_step_clipper} times in a row. It has both moments, an "
            "error and what it has moved by whole, 16 bytes a parameter. Evaluation "
            "and checkpoints have the parameters of the last exchange.",
        )
