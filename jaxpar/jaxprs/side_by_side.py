"""How is one function computed for two halves of its rows at once, loop by loop?

Called twice, a function with a scan over layers runs all layers for one half, then all
for the other. Here both calls share each scan: an iteration computes a layer for one
half and for the other. Neither needs the other's results, so that a compiler can let
one half wait for other devices while the other computes.

Source: Wang et al. 2024, "Domino: Eliminating Communication in LLM Training via Generic
Tensor Slicing and Overlapping", section 3.2 (row split).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxpar.jaxprs.compat import scan_counts
from jaxpar.jaxprs.evaluate import bind_in_scope, read, scope_of

Pair = tuple[Any, Any]
"""The values of the two calls; the same object where they are one."""


def side_by_side(
    closed: core.ClosedJaxpr, first: Sequence[Any], second: Sequence[Any]
) -> tuple[list, list]:
    """Evaluate a jaxpr for two lists of inputs.

    What is made of the same inputs alone is computed once.

    Args:
      closed: the jaxpr.
      first: its inputs.
      second: the same; an input that both share is the same object.

    Returns:
      The two lists of outputs.

    Example:
      >>> closed = jax.make_jaxpr(lambda x, y: [x * y])(1.0, 1.0)
      >>> [float(out) for (out,) in side_by_side(closed, [2.0, 3.0], [5.0, 3.0])]
      [6.0, 15.0]
    """
    pairs = _evaluate(closed, list(zip(first, second, strict=True)))
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _evaluate(closed: core.ClosedJaxpr, ins: Sequence[Pair]) -> list[Pair]:
    jaxpr = closed.jaxpr
    env: dict[Any, Pair] = {
        var: (value, value)
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    env.update(zip(jaxpr.invars, ins, strict=True))
    for eqn in jaxpr.eqns:
        own = [_read(env, atom) for atom in eqn.invars]
        rule = _RULES.get(eqn.primitive.name, _twice)
        with scope_of(eqn):
            outs = _once(eqn, own) if all(map(_is_one, own)) else rule(eqn, own)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, atom) for atom in jaxpr.outvars]


def _read(env: dict[Any, Pair], atom: Any) -> Pair:
    value = read(env, atom)
    return (value, value) if isinstance(atom, core.Literal) else value


def _is_one(pair: Pair) -> bool:
    return pair[0] is pair[1]


def _once(eqn: core.JaxprEqn, ins: Sequence[Pair]) -> list[Pair]:
    return [(out, out) for out in bind_in_scope(eqn, [one for one, _ in ins])]


def _twice(eqn: core.JaxprEqn, ins: Sequence[Pair]) -> list[Pair]:
    first, second = (bind_in_scope(eqn, [pair[n] for pair in ins]) for n in (0, 1))
    return list(zip(first, second, strict=True))


def _inline(eqn: core.JaxprEqn, ins: Sequence[Pair]) -> list[Pair]:
    return _evaluate(eqn.params["jaxpr"], ins)


def _checkpoint(eqn: core.JaxprEqn, ins: Sequence[Pair]) -> list[Pair]:
    """Both halves in one checkpoint, of the same policy."""
    closed = core.ClosedJaxpr(eqn.params["jaxpr"], ())
    packing = _Packing(ins)
    made: list[_Packing] = []

    def body(values: list) -> list:
        outs = _evaluate(closed, packing.unpacked(values))
        made.append(_Packing(outs))
        return made[-1].packed(outs)

    how = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    outs = jax.checkpoint(body, **how)(packing.packed(ins))
    return made[-1].unpacked(outs)


def _scan(eqn: core.JaxprEqn, ins: Sequence[Pair]) -> list[Pair]:
    """Both halves in one scan."""
    num_consts, num_carry = scan_counts(eqn.params)
    consts, init = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    stacks = ins[num_consts + num_carry :]
    packing = _Packing(stacks)
    made: list[_Packing] = []

    def body(carry: list[Pair], xs: list) -> tuple[list[Pair], list]:
        own = [*consts, *carry, *packing.unpacked(xs)]
        outs = _evaluate(eqn.params["jaxpr"], own)
        made.append(_Packing(outs[num_carry:]))
        return outs[:num_carry], made[-1].packed(outs[num_carry:])

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, list(init), packing.packed(stacks), **how)
    return [*carry, *made[-1].unpacked(ys)]


class _Packing:
    """Values without those that are one, for a transformation to carry."""

    def __init__(self, pairs: Sequence[Pair]):
        self._flags = [_is_one(pair) for pair in pairs]

    def packed(self, pairs: Sequence[Pair]) -> list:
        """A list of arrays, and of pairs of arrays."""
        together = zip(pairs, self._flags, strict=True)
        return [pair[0] if flag else tuple(pair) for pair, flag in together]

    def unpacked(self, values: Sequence[Any]) -> list[Pair]:
        """Undo `packed`, for the same places."""
        together = zip(values, self._flags, strict=True)
        return [(value, value) if flag else tuple(value) for value, flag in together]


_RULES: dict[str, Callable[[core.JaxprEqn, Sequence[Pair]], list[Pair]]] = {
    "jit": _inline,
    "pjit": _inline,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
}
