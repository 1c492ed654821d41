"""How is a block's backward pass split: what it saves, and what can be deferred.

`trace_pullback` runs `jax.vjp` of a block on shapes and reads the pullback as a jaxpr.
Its constants are the residuals; those that are weights or other arguments need not be
saved. Its equations form two halves: those that the input's gradient needs, and the
matmuls that only weight gradients need, with all equations that depend on them. The
operands of those matmuls are passed between the halves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxpar.jaxprs.evaluate import bind, flops, inlined, read, shape_of
from jaxpar.types import Params, PyTree

BlockFn = Callable[..., tuple[PyTree, PyTree]]
"""``(params, hidden, *others) -> (hidden, state)``; the state has no gradient."""


@dataclasses.dataclass(frozen=True)
class Pullback:
    """A block's backward pass.

    Attributes:
      jaxpr: from the constants and the output's cotangents to the gradients of the
        weights and of the input; without calls.
      given: for each constant its index among the leaves of (params, others); or its
        value, if it is known at trace time; or None for a residual that the forward
        pass has to save.
      params: the tree structure of the parameters.
      hidden: the tree structure of the input.
    """

    jaxpr: core.ClosedJaxpr
    given: tuple[int | np.ndarray | None, ...]
    params: Any
    hidden: Any

    def run(
        self, kept: Sequence[jax.Array], arguments: tuple, cotangent: PyTree
    ) -> tuple[Params, PyTree]:
        """Run both halves: gradients of the weights and of the input."""
        ins = self._ins(kept, arguments, cotangent)
        return self._outs(core.jaxpr_as_fun(self.jaxpr)(*ins))

    def run_input(
        self, kept: Sequence[jax.Array], arguments: tuple, cotangent: PyTree
    ) -> tuple[Params, PyTree, list[jax.Array]]:
        """Run the first half.

        Returns:
          Gradients of the weights, zero where the second half computes them; the
          gradient of the input; the inputs of the second half.
        """
        env = dict(
            zip(
                self.jaxpr.jaxpr.invars,
                self._ins(kept, arguments, cotangent),
                strict=True,
            )
        )
        self._evaluate(env, late=False)
        weights, hidden = self._outs(self._read(env))
        return weights, hidden, [env[var] for var in self.products]

    def run_weights(self, products: Sequence[jax.Array]) -> Params:
        """Run the second half: gradients of the weights, zero where the first half
        computed them."""
        env: dict[Any, Any] = dict(zip(self.products, products, strict=True))
        self._evaluate(env, late=True)
        return self._outs(self._read(env))[0]

    @property
    def late(self) -> frozenset[int]:
        """Indices of the second half's equations."""
        jaxpr = self.jaxpr.jaxpr
        num_weights = self.params.num_leaves
        wanted = {v for v in jaxpr.outvars[num_weights:] if isinstance(v, core.Var)}
        needed = set()
        for number, eqn in reversed(list(enumerate(jaxpr.eqns))):
            if wanted & set(eqn.outvars):
                needed.add(number)
                wanted |= {v for v in eqn.invars if isinstance(v, core.Var)}
        late, made = set(), set()
        for number, eqn in enumerate(jaxpr.eqns):
            follows = made & {v for v in eqn.invars if isinstance(v, core.Var)}
            is_product = eqn.primitive.name == "dot_general"
            if number not in needed and (is_product or follows):
                late.add(number)
                made |= set(eqn.outvars)
        return frozenset(late)

    @property
    def deferred(self) -> float:
        """Fraction of the backward pass's FLOPs that is in the second half."""
        eqns, late = self.jaxpr.jaxpr.eqns, self.late
        return flops(eqns[i] for i in late) / (flops(eqns) or 1)

    @property
    def products(self) -> list[core.Var]:
        """The variables that the second half needs from the first."""
        found: dict[core.Var, None] = {}
        made: set[core.Var] = set()
        for number in sorted(self.late):
            eqn = self.jaxpr.jaxpr.eqns[number]
            for var in eqn.invars:
                if isinstance(var, core.Var) and var not in made:
                    found[var] = None
            made |= set(eqn.outvars)
        return list(found)

    def _ins(
        self, kept: Sequence[jax.Array], arguments: tuple, cotangent: PyTree
    ) -> list[Any]:
        leaves, rest = jax.tree.leaves(arguments), iter(kept)

        def const(at: int | np.ndarray | None) -> Any:
            if at is None:
                return next(rest)
            return leaves[at] if isinstance(at, int) else at

        return [*map(const, self.given), *jax.tree.leaves(cotangent)]

    def _outs(self, outs: Sequence[jax.Array]) -> tuple[Params, PyTree]:
        cut = self.params.num_leaves
        return (
            jax.tree.unflatten(self.params, outs[:cut]),
            jax.tree.unflatten(self.hidden, outs[cut:]),
        )

    def _evaluate(self, env: dict[Any, Any], *, late: bool) -> None:
        jaxpr = self.jaxpr.jaxpr
        env.update(zip(jaxpr.constvars, self.jaxpr.consts, strict=True))
        chosen = self.late
        for number, eqn in enumerate(jaxpr.eqns):
            if (number in chosen) == late:
                outs = bind(eqn, [read(env, atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, outs, strict=True))

    def _read(self, env: dict[Any, Any]) -> list[jax.Array]:
        """The outputs; zeros for those that are not computed."""
        return [
            read(env, atom)
            if isinstance(atom, core.Literal) or atom in env
            else jnp.zeros_like(shape_of(atom))
            for atom in self.jaxpr.jaxpr.outvars
        ]


def run_and_keep(
    block: BlockFn, params: Params, hidden: PyTree, *others: Any
) -> tuple[PyTree, list[jax.Array], PyTree]:
    """Run a block forwards.

    Returns:
      Its output; the residuals of its `Pullback`; its state.
    """
    (out, state), _, consts, given = _pulled(block, params, hidden, *others)
    kept = [x for x, at in zip(consts, given, strict=True) if at is None]
    return out, kept, state


def trace_pullback(
    block: BlockFn, params: Params, hidden: PyTree, *others: Any
) -> Pullback:
    """Trace a block's backward pass; nothing is computed.

    Args:
      block: the block.
      params: its parameters, or their shapes.
      hidden: its input, likewise.
      *others: its other arguments, likewise.

    Returns:
      The pullback, for arguments of these shapes.
    """
    found: list[tuple] = []

    def trace(params: Params, hidden: PyTree, *others: Any) -> PyTree:
        (out, _), pull, consts, given = _pulled(block, params, hidden, *others)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in consts]
        found.append((pull, shapes, given, jax.tree.map(_shape, out)))
        return out

    jax.eval_shape(trace, params, hidden, *others)
    pull, shapes, given, out = found[-1]

    def run(consts: list, cotangents: list) -> list[jax.Array]:
        closed = core.ClosedJaxpr(pull, consts)
        return core.jaxpr_as_fun(closed)(*cotangents)

    flat = inlined(run, shapes, jax.tree.leaves(out))
    return Pullback(flat, given, jax.tree.structure(params), jax.tree.structure(hidden))


def _pulled(
    block: BlockFn, params: Params, hidden: PyTree, *others: Any
) -> tuple[tuple, core.Jaxpr, list, tuple[int | np.ndarray | None, ...]]:
    """Outputs; the pullback's jaxpr, its constants, their indices in the arguments."""
    out, pull, state = jax.vjp(
        lambda p, h: block(p, h, *others), params, hidden, has_aux=True
    )
    closed = jax.make_jaxpr(pull)(jax.tree.map(_shape, out))
    leaves = jax.tree.leaves((params, others))
    places = {id(leaf): at for at, leaf in reversed(list(enumerate(leaves)))}
    given = tuple(
        places.get(id(const)) if isinstance(const, jax.Array) else np.asarray(const)
        for const in closed.consts
    )
    return (out, state), closed.jaxpr, list(closed.consts), given


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
