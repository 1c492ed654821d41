"""How is a block's backward pass split: what it saves, and what can be deferred.

`trace_pullback` runs `jax.vjp` of a block on shapes and reads the pullback as a jaxpr.
Its constants are the residuals; those that are weights or other arguments need not be
saved, and those that depend on frozen leaves alone, such as a kernel of 8 bits cast to
the compute dtype, are computed again. Its equations form two halves: those that the
input's gradient needs, and the matmuls that only weight gradients need, with all
equations that depend on them. The operands of those matmuls are passed between the
halves.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxpar.jaxprs.dependence import of_first_inputs
from jaxpar.jaxprs.evaluate import bind, flops, inlined, read, shape_of
from jaxpar.types import Params, PyTree

BlockFn = Callable[..., tuple[PyTree, PyTree]]
"""``(params, hidden, frozen, *others) -> (hidden, state)``; of the arguments, `params`
and `hidden` have gradients, and of the results `hidden` alone."""


@dataclasses.dataclass(frozen=True)
class Again:
    """A residual that is computed again, as this output of `Pullback.again`."""

    number: int


@dataclasses.dataclass(frozen=True)
class Pullback:
    """A block's backward pass.

    Attributes:
      jaxpr: from the constants and the output's cotangents to the gradients of the
        weights and of the input; without calls.
      given: for each constant its index among the leaves of (params, (frozen,
        *others)); or its value, if it is known at trace time; or how it is computed
        again; or None for a residual that the forward pass has to save.
      again: from the leaves of frozen to the residuals that are computed again.
      params: the tree structure of the parameters.
      hidden: the tree structure of the input.
    """

    jaxpr: core.ClosedJaxpr
    given: tuple[int | np.ndarray | Again | None, ...]
    again: core.ClosedJaxpr
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
        again = core.jaxpr_as_fun(self.again)(*jax.tree.leaves(arguments[1][0]))

        def const(at: int | np.ndarray | Again | None) -> Any:
            if at is None:
                return next(rest)
            if isinstance(at, Again):
                return again[at.number]
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
    block: BlockFn, params: Params, hidden: PyTree, frozen: Params, *others: Any
) -> tuple[PyTree, list[jax.Array], PyTree]:
    """Run a block forwards.

    Returns:
      Its output; the residuals of its `Pullback`; its state.
    """
    arguments = params, hidden, frozen, *others
    (out, state), _, consts, given = _pulled(block, *arguments)
    given, _ = _with_again(given, block, *arguments)
    kept = [x for x, at in zip(consts, given, strict=True) if at is None]
    return out, kept, state


def trace_pullback(
    block: BlockFn, params: Params, hidden: PyTree, frozen: Params, *others: Any
) -> Pullback:
    """Trace a block's backward pass; nothing is computed.

    Args:
      block: the block.
      params: its parameters, or their shapes.
      hidden: its input, likewise.
      frozen: its parameters that are not trained, likewise.
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

    arguments = params, hidden, frozen, *others
    jax.eval_shape(trace, *arguments)
    pull, shapes, given, out = found[-1]
    given, again = _with_again(given, block, *arguments)

    def run(consts: list, cotangents: list) -> list[jax.Array]:
        closed = core.ClosedJaxpr(pull, consts)
        return core.jaxpr_as_fun(closed)(*cotangents)

    flat = inlined(run, shapes, jax.tree.leaves(out))
    structures = jax.tree.structure(params), jax.tree.structure(hidden)
    return Pullback(flat, given, again, *structures)


def _with_again(
    given: tuple, block: BlockFn, params: Params, hidden: PyTree, *others: Any
) -> tuple[tuple, core.ClosedJaxpr]:
    """`Pullback.given` and `Pullback.again`, from what `_pulled` returns.

    Args:
      given: as `_pulled` returns it.
      block: the block.
      params: its parameters, or their shapes.
      hidden: its input, likewise.
      *others: its other arguments, likewise, the frozen leaves first.
    """

    def kept(frozen: Params, rest: tuple) -> list[jax.Array]:
        params, hidden, others = rest
        _, _, consts, given = _pulled(block, params, hidden, frozen, *others)
        return [x for x, at in zip(consts, given, strict=True) if at is None]

    frozen, *rest = others
    if not jax.tree.leaves(frozen):
        return given, jax.make_jaxpr(list)(())
    closed = jax.make_jaxpr(kept)(frozen, (params, hidden, rest))
    numbers, again = of_first_inputs(closed, len(jax.tree.leaves(frozen)))
    places = [place for place, at in enumerate(given) if at is None]
    made = {places[n]: Again(order) for order, n in enumerate(numbers)}
    return tuple(made.get(place, at) for place, at in enumerate(given)), again


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
