"""How does an optax transformation run on a mesh: on the logical state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.optim.applied import updated_if
from jaxpar.optim.loops import with_divided_loops
from jaxpar.step.reduction import PLAIN, Reduction
from jaxpar.step.update import Update
from jaxpar.types import Metrics, PyTree


@dataclasses.dataclass(frozen=True)
class OptaxUpdate(Update):
    """An optax transformation; its packed state is the logical state.

    Attributes:
      optimizer: the transformation.
      extras: keyword arguments of its update: ``value`` (the loss), ``grad`` (the
        gradients that it is given).
      loops_over: data shards that divide its loops of matmuls; 1 to leave the update
        unchanged.
      reduction: how the gradients that it gets are reduced.
    """

    optimizer: optax.GradientTransformation
    extras: tuple[str, ...]
    loops_over: int
    reduction: Reduction = PLAIN

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
        """See `Update`; reports the learning rate if the state has it."""
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32) * factor, grads)
        extras = {"value": loss, "grad": grads}
        named = {name: extras[name] for name in self.extras}
        update = self.optimizer.update
        if self.loops_over > 1:
            update = with_divided_loops(update, self.loops_over)

        def stepped(before: PyTree, grads: PyTree, named: PyTree) -> PyTree:
            params, opt_state = before
            updates, opt_state = update(grads, opt_state, params, **named)
            return optax.apply_updates(params, updates), opt_state

        before = params, opt_state
        params, opt_state = updated_if(applied, stepped, before, grads, named)
        return params, opt_state, learning_rate_in(opt_state)

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        if self.loops_over == 1:
            return ()
        return (
            "optimizer: its loops of matmuls are divided among the data shards, which "
            "exchange the matrices once before and once after them.",
        )


def learning_rate_in(opt_state: Any) -> Metrics:
    """The rate in the state of `optax.inject_hyperparams`, if there is one."""
    rates = optax.tree.get_all_with_path(opt_state, "learning_rate")
    return {"learning_rate": jnp.asarray(rates[0][1])} if rates else {}
