"""How is a momentum exchanged in one bit an element, once gradients have been enough?

In the warm-up gradients are reduced as ever, and every worker keeps the momentum of its
own. Then each adds its own gradient to the momentum that all have in common, and the
average of these is exchanged by their signs (`jaxpar.optim.sign_exchange`): it is the
next momentum, which the update gets in place of a gradient.

Source: Tang et al. 2021, "1-bit Adam".
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.jaxprs.branches import expected
from jaxpar.optim.workers import (
    SignReduction,
    exchanged_signs,
    norm_of_sums,
    own_gradients,
    own_shard,
    workers_of,
    zero_errors,
)
from jaxpar.sharding.collectives import Collectives
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import PLAIN, clip_factor
from jaxpar.types import PyTree

Leaves = Sequence[LeafSharding]


@dataclasses.dataclass(frozen=True)
class OneBitMomentum(SignReduction):
    """The sum of gradients, and later the momentum, exchanged by signs.

    Attributes:
      freeze_step: steps of the warm-up.
      b1: the momentum's decay.
      clip_norm: the largest norm of gradients. In the warm-up of their sum; then one
        factor for all workers keeps the root mean square of their norms below it.
    """

    freeze_step: int
    b1: float
    clip_norm: float | None = None

    def warm_up(self) -> int:
        """See `Reduction`."""
        return self.freeze_step

    def init(self, leaves: Leaves) -> PyTree:
        """Whole on each worker: a momentum and an error; of its chunks another error.

        Args:
          leaves: as of `Reduction.init`.
        """
        errors = zero_errors(leaves)
        numbers = {"count": jnp.int32(0), "norm": jnp.float32(0)}
        return {**numbers, "momentum": errors["worker"], **errors}

    def begin(self, leaves: Leaves, opt_state: PyTree) -> PyTree:
        """See `Reduction`: the momentum is the optimizer's, and errors are zero."""
        known = tree.named_leaves(opt_state)
        carry = self.init(leaves)
        momentum = {
            leaf.name: known[f"mu/{leaf.name}"].reshape(leaf.view_shape)
            for leaf in leaves
        }
        count = known["count"].astype(jnp.int32)
        return {**carry, "count": count, "momentum": momentum}

    def reduce(
        self,
        leaves: Leaves,
        grads: Sequence[jax.Array],
        carry: PyTree,
        collectives: Collectives,
    ) -> tuple[list[jax.Array], PyTree]:
        """See `Reduction`; by the step's number as it is without compression, or so."""
        names, count = [leaf.name for leaf in leaves], carry["count"]
        workers = workers_of(leaves)
        local, own_norm = own_gradients(leaves, grads, collectives)
        kept = [carry[part][name] for part in ("worker", "server") for name in names]

        def momenta(norm: jax.Array) -> list[jax.Array]:
            factor = (1 - self.b1) * clip_factor(norm, self.clip_norm)
            pairs = zip(names, local, strict=True)
            old = carry["momentum"]
            return [self.b1 * old[name] + factor * own for name, own in pairs]

        def warm(*kept: Any) -> tuple:
            given = [own / workers for own in local]
            found, _ = PLAIN.reduce(leaves, given, (), collectives)
            sums = [x.astype(jnp.float32) for x in found]
            norm = norm_of_sums(leaves, sums, collectives)
            factor = clip_factor(norm, self.clip_norm)
            return [factor * x for x in sums], norm, momenta(norm), list(kept)

        def last(*kept: Any) -> tuple:
            sums, norm, momentum, errors = warm(*kept)
            axes = leaves[0].reduce_axes
            common = [jax.lax.psum(x, axes) / workers for x in momentum]
            return sums, norm, common, errors

        def compressed(*kept: Any) -> tuple:
            # One bit has no zero: what has had no gradient in the warm-up stays there.
            masks = [carry["momentum"][name] != 0 for name in names]
            found, errors = exchanged_signs(leaves, momenta(own_norm), masks, kept)
            pairs = zip(leaves, found, strict=True)
            return [own_shard(*pair) for pair in pairs], own_norm, found, errors

        phase = (count >= self.freeze_step - 1).astype(jnp.int32)
        phase += (count >= self.freeze_step).astype(jnp.int32)
        branches = [warm, last, compressed]
        # What is planned and explained is the phase in which a run is longest.
        with expected(0.0, 0.0, 1.0):
            sums, norm, momentum, errors = jax.lax.switch(phase, branches, *kept)
        half = len(names)
        return sums, {
            "count": count + 1,
            "norm": jnp.where(jnp.isfinite(own_norm), norm, jnp.nan),
            "momentum": dict(zip(names, momentum, strict=True)),
            "worker": dict(zip(names, errors[:half], strict=True)),
            "server": dict(zip(names, errors[half:], strict=True)),
        }

    def notes(self) -> tuple[str, ...]:
        """See `Reduction`."""
        return (
            f"data: after {self.freeze_step} steps momenta are exchanged by their "
            "signs; each worker has a whole momentum and a whole error, 8 bytes a "
            "parameter. grad_norm is then the root mean square of the workers' own.",
        )
