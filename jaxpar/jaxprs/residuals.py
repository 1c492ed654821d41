"""Which policy chooses the residuals of a checkpoint inside a checkpoint?

jax applies the *outermost* `jax.checkpoint`'s policy to every operation inside, also to
those of nested checkpoints. A policy that saves almost everything therefore undoes the
remat of an inner `jax.checkpoint`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero


def with_own_residuals(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a function choose its own residuals inside any `jax.checkpoint`.

    It is linearised first, so the outer policy applies only to the residuals that the
    function's own policy chose. It has no forward-mode derivative.

    Args:
      run: a pure function of one pytree of arrays, such as `jax.checkpoint` returns.

    Returns:
      A function with the same values and gradients.

    Example:
      >>> run = with_own_residuals(jax.checkpoint(lambda x: jnp.sin(x[0]) * x[1]))
      >>> float(jax.grad(run)((0.0, 3.0))[0])
      3.0
    """

    @jax.custom_vjp
    def call(args: Any) -> Any:
        return run(args)

    def forward(args: Any) -> tuple[Any, Any]:
        primals, structure = jax.tree.flatten(args, is_leaf=_is_primal)
        values = [primal.value for primal in primals]
        moving = tuple(primal.perturbed for primal in primals)

        def of_moving(moved: Sequence[jax.Array]) -> Any:
            left = iter(moved)
            merged = [
                next(left) if moves else value
                for value, moves in zip(values, moving, strict=True)
            ]
            return run(jax.tree.unflatten(structure, merged))

        chosen = [v for v, moves in zip(values, moving, strict=True) if moves]
        outs, pull = jax.vjp(of_moving, chosen)
        return outs, _Pull(pull, moving, structure)

    def backward(pull: _Pull, cotangents: Any) -> tuple[Any]:
        return (pull(cotangents),)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


@jax.tree_util.register_pytree_node_class
class _Pull:
    """A vjp with respect to some of the leaves; None for the others."""

    def __init__(self, pull: Callable, moving: tuple[bool, ...], structure: Any):
        self.pull, self.moving, self.structure = pull, moving, structure

    def __call__(self, cotangents: Any) -> Any:
        made = jax.tree.map(
            instantiated, cotangents, is_leaf=lambda x: isinstance(x, SymbolicZero)
        )
        (pulled,) = self.pull(made)
        left = iter(pulled)
        grads = [next(left) if moves else None for moves in self.moving]
        return jax.tree.unflatten(self.structure, grads)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        return (self.pull,), (self.moving, self.structure)

    @classmethod
    def tree_unflatten(cls, static: tuple, children: tuple) -> "_Pull":
        return cls(*children, *static)


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def instantiated(cotangent: Any) -> Any:
    """An array of zeros in place of a symbolic zero."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.zeros(aval.shape, aval.dtype)
    return np.zeros(aval.shape, aval.dtype)
