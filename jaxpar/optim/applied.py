"""How does an update that may not be applied run without copies of its state?

``where(applied, new, old)`` behind an update keeps the old state alive until the last
use of the new one: XLA:CPU computes the new moments once for the state and once more
for the parameters, and copies the old ones that the first has overwritten. Chosen where
it is made, a moment is written in place, and what follows reads it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.jaxprs.evaluate import bind, read
from jaxpar.types import PyTree


def updated_if(
    applied: jax.Array, fn: Callable[..., PyTree], old: PyTree, *args: Any
) -> PyTree:
    """Compute ``where(applied, fn(old, *args), old)``, choosing as early as possible.

    What `fn` computes of a new leaf is computed of the chosen one. It is the same if
    the step is applied, and otherwise not used.

    Args:
      applied: a boolean scalar.
      fn: takes and returns pytrees of arrays; what it returns has `old`'s structure,
        shapes and dtypes.
      old: its first argument.
      *args: its others.

    Returns:
      The pytree that `fn` returns, or `old`.
    """
    closed = jax.make_jaxpr(fn)(old, *args)
    jaxpr, leaves = closed.jaxpr, jax.tree.leaves(old)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, jax.tree.leaves((old, args)), strict=True))
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    kept: dict[Any, int] = {}
    for number, atom in enumerate(jaxpr.outvars):
        if not isinstance(atom, core.Literal) and atom in made:
            kept.setdefault(atom, number)

    def chosen(new: Any, number: int) -> jax.Array:
        return jnp.where(applied, new, leaves[number])

    for eqn in jaxpr.eqns:
        outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
        for var, out in zip(eqn.outvars, outs, strict=True):
            env[var] = chosen(out, kept[var]) if var in kept else out
    outs = []
    for number, atom in enumerate(jaxpr.outvars):
        out = read(env, atom)
        is_chosen = not isinstance(atom, core.Literal) and kept.get(atom) == number
        outs.append(out if is_chosen else chosen(out, number))
    return jax.tree.unflatten(jax.tree.structure(old), outs)
